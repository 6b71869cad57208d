import numpy as np
import pytest

from ompq.entropy_coding.bit_packing import pack_bits, stream_length, unpack_bits

SIZES = [0, 1, 2, 3, 7, 8, 9, 15, 64, 101, 1000]


def random_codes(count, bits, seed=0):
    return np.random.default_rng(seed).integers(1 << bits, size=count, dtype=np.uint8)


def as_one_number(codes, bits):
    """The stream by its definition: one long integer, lowest bits first."""
    number = sum(code << (at * bits) for at, code in enumerate(codes.tolist()))
    return list(number.to_bytes((len(codes) * bits + 7) // 8, "little"))


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("count", SIZES)
def test_stream_is_one_long_integer_and_comes_back(bits, count):
    codes = random_codes(count, bits)
    stream = pack_bits(codes, bits)
    assert stream.dtype == np.uint8
    assert stream.tolist() == as_one_number(codes, bits)
    assert len(stream) == stream_length(count, bits)
    assert np.array_equal(unpack_bits(stream, bits, (count,)), codes)


@pytest.mark.parametrize("bits", range(2, 9))
def test_long_streams_do_not_depend_on_how_they_are_cut(bits):
    codes = random_codes((1 << 18) + 13, bits)
    stream = pack_bits(codes, bits)
    assert np.array_equal(unpack_bits(stream, bits, codes.shape), codes)
    middle = (1 << 17) - 8  # a multiple of 8 codes starts with a byte of its own
    start = middle * bits // 8
    part = stream[start : start + 20 * bits]
    assert part.tolist() == as_one_number(codes[middle : middle + 160], bits)


@pytest.mark.parametrize("bits", range(2, 9))
def test_extreme_codes(bits):
    for code in (0, (1 << bits) - 1):
        codes = np.full(37, code, np.uint8)
        assert np.array_equal(unpack_bits(pack_bits(codes, bits), bits, (37,)), codes)


def test_any_shape_and_layout_is_read_in_logical_order():
    codes = random_codes(24, 3).reshape(2, 3, 2, 2)
    other = np.asfortranarray(codes)
    assert np.array_equal(pack_bits(other, 3), pack_bits(codes.reshape(-1), 3))


def test_codes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"code 9 does not fit into 3 bits.*is 7"):
        pack_bits(np.array([1, 9], np.uint8), 3)


@pytest.mark.parametrize("bits", [1, 9])
def test_other_widths_are_refused(bits):
    with pytest.raises(ValueError, match=f"bits={bits} is not supported"):
        pack_bits(np.zeros(1, np.uint8), bits)
    with pytest.raises(ValueError, match=f"bits={bits} is not supported"):
        unpack_bits(np.zeros(1, np.uint8), bits, (1,))


def test_streams_of_another_length_are_refused():
    stream = np.zeros(4, np.uint8)
    with pytest.raises(
        ValueError, match="4 bytes does not hold 8 codes of 3 bits, which take 3"
    ):
        unpack_bits(stream, 3, (2, 4))
