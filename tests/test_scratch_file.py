"""Tensors in a scratch file come back as they were stored."""

import pytest
import torch

from nets import values
from ompq.scratch_file import Parked, ScratchFile, StoredRows, owns_memory


def test_stored_rows_are_within_half_precision():
    given = values(7, 3, 5) * torch.logspace(-6, 7, 7)[:, None, None]
    rows = StoredRows(ScratchFile(), given[:4])
    rows.append(given[4:])
    index = torch.tensor([6, 0, 3, 3])
    found = rows.index_select(0, index)
    assert rows.shape == given.shape
    assert len(rows) == 7
    error = (found - given[index]).abs().flatten(1).amax(1)
    assert (error <= given[index].abs().flatten(1).amax(1) * 2**-11).all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_numbers_that_are_no_floats_are_stored_as_they_are(dtype):
    given = (values(6, 4) * 10).to(dtype)
    rows = StoredRows(ScratchFile(), given)
    assert rows.index_select(0, torch.arange(6)).equal(given)


def test_stored_rows_are_multiplied_like_a_tensor():
    given = values(5, 4)
    rows = StoredRows(ScratchFile(), given)
    rows.mul_(0.25)
    found = rows.index_select(0, torch.arange(5))
    torch.testing.assert_close(found, 0.25 * given, rtol=1e-3, atol=1e-3)


def test_a_file_uses_freed_ranges_again():
    file = ScratchFile()
    first = StoredRows(file, values(8, 16))
    end = file._end
    del first
    kept = [StoredRows(file, values(2, 16)) for _ in range(4)]
    assert len(kept) == 4
    assert file._end == end


def test_a_parked_tensor_comes_back_where_its_holders_expect_it():
    tensor, file = values(3, 4, 5).to(memory_format=torch.contiguous_format), None
    file = ScratchFile()
    view, before = tensor.transpose(0, 1), tensor.clone()
    parked = Parked(file, tensor)
    assert tensor.untyped_storage().nbytes() == 0
    parked.restore()
    torch.testing.assert_close(view, before.transpose(0, 1), rtol=1e-3, atol=1e-3)
    tensor.add_(1)  # in the meantime
    parked.park()
    parked.restore()
    torch.testing.assert_close(tensor, before + 1, rtol=1e-3, atol=1e-3)
    del tensor, view
    assert not parked.alive


def test_a_part_of_a_tensor_is_not_parked():
    whole = values(4, 6)
    assert owns_memory(whole)
    assert not owns_memory(whole[:2])
    assert not owns_memory(whole.long())
