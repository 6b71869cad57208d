import pytest
import torch

import ompq
from nets import images
from ompq.errors import SampleError


def test_images_come_first_and_views_are_windows_of_them():
    given = images(6)
    found = ompq.image_views(given, 4)
    assert found.shape == (24, *given.shape[1:])
    assert torch.equal(found[:6], given)
    side = given.shape[-1]
    shift = side // 8
    wide = torch.nn.ReflectionPad2d(shift)(given)
    steps = range(2 * shift + 1)
    seen = set()
    for number, view in enumerate(found[6:]):
        windows = {
            (qmax, left, flip): window.flip(-1) if flip else window
            for qmax in steps
            for left in steps
            for flip in (False, True)
            for window in [wide[number % 6, :, qmax : qmax + side, left : left + side]]
        }
        matches = [key for key, window in windows.items() if torch.equal(window, view)]
        assert matches
        seen.add(matches[0])
    assert len(seen) > 4  # not always the same
    assert not torch.equal(found[6:12], found[12:18])


def test_views_follow_the_seed_and_one_view_changes_nothing():
    given = images(4)
    assert torch.equal(ompq.image_views(given, 3), ompq.image_views(given, 3))
    other = ompq.image_views(given, 3, seed=1)
    assert not torch.equal(ompq.image_views(given, 3), other)
    assert torch.equal(ompq.image_views(given, 1), given)


def test_what_is_no_image_is_refused():
    with pytest.raises(ValueError, match="views=0 must be at least 1"):
        ompq.image_views(images(2), 0)
    words = r"samples of shape \(3, 4\) and torch.float32 are no images"
    with pytest.raises(SampleError, match=words):
        ompq.image_views(torch.zeros(3, 4), 2)
    words = "torch.int64 are no images: views need floats"
    with pytest.raises(SampleError, match=words):
        ompq.image_views(torch.zeros(1, 1, 4, 4, dtype=torch.int64), 2)
