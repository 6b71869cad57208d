"""Streams of codes: dense, or entropy-coded: exact, close to the entropy, safe."""

import math
import time
from base64 import b85decode
from collections import Counter

import numpy as np
import pytest

from ompq.entropy_coding.codec import (
    CodeModel,
    coded_size,
    decode,
    encode,
    rows_are_alike,
)
from ompq.errors import PackedFileError

RANDOM = np.random.default_rng(0)


def laplace(shape, scale):
    """Codes around 128; ``scale`` broadcasts with the shape."""
    codes = np.round(RANDOM.laplace(0, scale, shape)).clip(-128, 127)
    return (codes + 128).astype(np.uint8)


def entropy_bytes(codes):
    """What the best code for independent symbols takes, without its table."""
    counts = Counter(codes.ravel().tolist())
    return sum(n * math.log2(codes.size / n) for n in counts.values()) / 8


LAYERS = {
    "linear": laplace((80, 120), 2.0),
    "convolution": laplace((40, 24, 3, 3), 1.2),
    "depthwise": laplace((96, 1, 3, 3), 6.0),
    "patches": laplace((16, 3, 16, 16), 0.4),
    "vector": laplace((500,), 3.0),
    "one": np.array([[7]], np.uint8),
    "constant": np.full((30, 50), 255, np.uint8),
    "nearly constant": np.where(np.arange(9000) == 77, 9, 8).astype(np.uint8),
    "uniform": RANDOM.integers(0, 256, (60, 70), dtype=np.uint8),
    "few bits": RANDOM.integers(0, 4, (64, 8, 3, 3), dtype=np.uint8),
    "ends": RANDOM.choice(np.array([0, 255], np.uint8), (33, 9)),
    "transposed": laplace((24, 36), 2.0).T,
    "none": np.zeros((0, 4), np.uint8),
}


@pytest.mark.parametrize("codes", LAYERS.values(), ids=LAYERS)
def test_codes_come_back_and_the_size_is_known_before(codes):
    data = encode(codes)
    assert np.array_equal(decode(data, codes.shape), codes)
    assert len(data) <= coded_size(codes) <= len(data) + 16
    assert encode(codes) == data


@pytest.mark.parametrize("scale", [0.2, 0.5, 1.0, 3.0, 10.0, 30.0])
def test_independent_codes_take_their_entropy(scale):
    codes = laplace((400, 300), scale)
    assert coded_size(codes) == pytest.approx(entropy_bytes(codes), rel=0.006, abs=64)


def test_a_byte_holds_at_most_512_codes():
    codes = np.full((1000, 1024), 128, np.uint8)
    assert codes.size / 512 <= len(encode(codes)) < 1.03 * codes.size / 512 + 64


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_and_columns_of_their_own_scale_take_fewer_bytes(axis):
    scales = 2.0 ** RANDOM.uniform(-1, 4, 200)
    codes = laplace((200, 200), scales if axis else scales[:, None])
    lines = codes.T if axis else codes
    apart = sum(map(entropy_bytes, lines))  # too low: it fits each line's noise
    assert apart < coded_size(codes) < 0.93 * entropy_bytes(codes)


def test_kernels_of_their_own_scale_take_fewer_bytes():
    codes = laplace((80, 60, 3, 3), 2.0 ** RANDOM.uniform(-1, 4, (80, 60, 1, 1)))
    assert coded_size(codes) < 0.96 * entropy_bytes(codes)


@pytest.mark.parametrize("name", ["linear", "convolution", "few bits"])
def test_the_table_prices_every_code(name):
    codes = LAYERS[name]
    model = CodeModel.fit(codes)
    table, classes = model.bits, model.classes(codes)
    assert np.exp2(-table).sum(1) == pytest.approx(1, abs=1e-4)
    assert np.isfinite(table[:, codes.min() : codes.max() + 1]).all()
    assert classes.shape == codes.shape and classes.max() < len(table)
    written = 8 * len(encode(codes))
    numbers = model.rows.size + model.columns.size + model.steps.size
    priced = table[classes, codes].sum()
    assert priced < written < priced + 9 * numbers + 150


def smooth_kernels(height, width):
    """Kernels that are planes: each code follows from those next to it."""
    y, x = np.indices((height, width))
    slopes, noise = RANDOM.normal(0, 3, (3, 60, 40, 1, 1)), (60, 40, height, width)
    values = slopes[0] + slopes[1] * (y - 1) + slopes[2] * (x - 1)
    return (128 + np.round(values + RANDOM.normal(0, 1, noise))).astype(np.uint8)


@pytest.mark.parametrize(("height", "width"), [(3, 3), (1, 7), (7, 1), (2, 5)])
def test_smooth_kernels_take_fewer_bytes(height, width):
    codes = smooth_kernels(height, width)
    data = encode(codes)
    assert len(data) < 0.88 * entropy_bytes(codes)
    assert np.array_equal(decode(data, codes.shape), codes)
    assert len(data) <= coded_size(codes) <= len(data) + 16
    # Without their places the same codes are as long as their frequencies say.
    mixed = RANDOM.permutation(codes.ravel()).reshape(codes.shape)
    assert len(encode(mixed)) > 0.99 * entropy_bytes(codes)


def test_the_codes_before_decide_on_a_class():
    codes = smooth_kernels(3, 3)
    model = CodeModel.fit(codes)
    other = codes.copy()
    other[..., 2, 2] = 128
    assert len(model.bits) > 1
    assert np.array_equal(model.classes(codes), model.classes(other))
    other[..., 0, 0] = 128
    assert not np.array_equal(model.classes(codes), model.classes(other))


def rows_of_a_classifier(rows, columns, noise):
    """Rows that are sums of the same eight, and noise."""
    parts = RANDOM.normal(0, 1, (rows, 8)) @ RANDOM.normal(0, 1, (8, columns))
    values = parts + RANDOM.normal(0, noise, (rows, columns))
    return (128 + np.round(values)).clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize("shape", [(300, 400), (61, 900, 1, 1), (1024, 130)])
def test_rows_that_are_alike_take_fewer_bytes(shape):
    codes = rows_of_a_classifier(*shape[:2], 1.5).reshape(shape)
    assert rows_are_alike(codes - 128.0)
    data = encode(codes)
    assert len(data) < 0.93 * entropy_bytes(codes)
    assert np.array_equal(decode(data, codes.shape), codes)
    assert len(data) <= coded_size(codes) <= len(data) + 16
    model = CodeModel.fit(codes)
    priced = model.bits[model.classes(codes), codes].sum()
    assert priced < 8 * len(data) < priced + 9 * model.steps.size + 150
    # Rows of their own, and as many codes, are as long as their frequencies say.
    mixed = RANDOM.permutation(codes.ravel()).reshape(shape)
    assert not rows_are_alike(mixed - 128.0)
    assert len(encode(mixed)) > 0.99 * entropy_bytes(codes)


def test_a_filter_looks_only_at_codes_before():
    codes = rows_of_a_classifier(300, 400, 1.5)
    model = CodeModel.fit(codes)
    other = codes.copy()
    other[:, 384:] = 128  # the last block
    assert len(model.bits) > 1
    classes, changed = model.classes(codes), model.classes(other)
    assert np.array_equal(classes[:, :384], changed[:, :384])
    # Of that, only the first rows to be read, every eighth one, have no rows before.
    assert np.array_equal(classes[::8, 384:], changed[::8, 384:])
    assert not np.array_equal(classes[:, 384:], changed[:, 384:])


def classes_by_integers(model, codes):
    """The classes of filtered codes, from one product of integers for each wave."""
    unit = round(4 * 2 ** (int(model.rows[0]) / 4)) / 1024
    inputs = np.rint((codes.astype(int) - model.centre) / unit).clip(-15, 15)
    inputs = inputs.astype(int)
    weights = np.zeros((len(codes), len(codes)), int)
    sides = np.full(codes.shape, 33)
    for start in range(0, codes.shape[1], 64):
        block, before = inputs[:, start : start + 64], []
        for first in (0, 4, 2, 6, 1, 5, 3, 7):
            wave, known = [*range(first, len(codes), 8)], block[before]
            own = np.ix_(wave, before)
            guess = weights[own] @ known / 4096
            if start and before:
                sides[wave, start : start + 64] = np.rint(guess).clip(-16, 16) + 16
            error = np.rint(16 * (block[wave] - guess)).clip(-1024, 1024)
            factor = np.float32(512 / max(np.linalg.norm(known.T @ known), 1))
            change = np.rint(np.float32(error @ known.T) * factor).astype(int)
            weights[own] = (weights[own] + change).clip(-1024, 1024)
            before += wave
    return np.searchsorted(model.starts, sides, "right")


@pytest.mark.parametrize("shape", [(300, 400), (61, 900), (1024, 130)])
def test_a_filter_computes_in_integers(shape):
    codes = rows_of_a_classifier(*shape, 1.5)
    model = CodeModel.fit(codes)
    assert len(model.bits) > 1
    assert np.array_equal(model.classes(codes), classes_by_integers(model, codes))


def test_filters_are_for_few_rows_and_for_many_bits():
    many = rows_of_a_classifier(1025, 200, 1.0)
    few = rows_of_a_classifier(300, 400, 1.0) // 64 * 64  # nearly all are 64 or 128
    same = np.repeat(RANDOM.integers(0, 9, (1, 400), dtype=np.uint8), 300, axis=0)
    for codes in (many, few, same):
        assert CodeModel.fit(codes).width == 0
        assert np.array_equal(decode(encode(codes), codes.shape), codes)


def test_a_model_has_no_price_for_codes_it_does_not_know():
    model = CodeModel.fit(np.array([[3, 4, 5]], np.uint8))
    assert model.size(np.array([[4, 4, 4]], np.uint8)) < 24
    assert np.isinf(model.bits[:, 6]).all()


def test_streams_of_other_machines_are_read():
    row, column, y, x = np.indices((6, 8, 3, 3))
    expected = 128 + ((row * column + y + 2 * x) % 7 - 3) * (column % 3)
    assert np.array_equal(decode(bytes.fromhex(STREAM), (6, 8, 3, 3)), expected)


STREAM = (
    "b73ac7a47ce6cbf9d4fec942ffc7189bfec50d859845f1dab7d748c2f0095694c15966618e24"
    "b269ea1ad2f7c732ae6fe34305eadca892c29652ae175228c69733b575df715d4d0787f35a1b"
    "94e43a8bb786075de8270bbab138aa7680cc5f638baa9ef08e3a0da5dc037e3d25f445dfd3c2"
    "088fb99483ba1460db2156dee0f23afa43ea34a436f6281bc7c9a011890fb93aae75"
)


def test_filtered_streams_of_other_machines_are_read():
    row, column = np.indices((24, 128))
    noise = (row * 7919 + column * 104729 + row * column * 31) % 101 // 34 - 1
    expected = 128 + 2 * (-1) ** (column * column % 11 + row % 3) + noise
    found = decode(b85decode(FILTERED), (24, 128))
    assert np.array_equal(found, expected)
    assert CodeModel.fit(found).width < 0


FILTERED = (
    "NK#Q!sB(<ryY&G|aE&g+Z&!dK<EitTcx!I10XgvcQO)0S^dFa}gtk}TUYuD2ecpFSg{U?gMA~-ybNUG&"
    "aJ^kEXDaL%8Ez>K{pPAn@P&Q>!pkCXb1N)<2N*-ADVd2ZfbgHg^K}w|$i1>`kG<<j?oZd@9|Z}KS18^y"
    "45zM|J<}Iy*J(FvW{H=wEu(Rt8;=;C8Wbcy#%v?rWcHZ29V(HVKEsjUxZOoq1&p1+8bz{$DuksG<*%V6"
    "yz^IoiPy5$s`b9Ewe*Sz;u7A3Vp9EWGcX);xqyfJB7^tjtf0wNsyzGsRUvA9?6#~8&6=rp5}FV5jBYD>"
    "A|O(cTQ+wC4?H-vHV-b>g)o9b&XR836J>$Z^F^B<0swIdH&=L7P7T`ZC?S(rIJe+`2uXSx*%*O3TIck9"
    "Ih~PH!qT4|82FK+r^pam?jwO3E!`h36Xz=VvYEC0*WMwN>ZzbCqoHNZKLbMsxJf$c&zC^7GMnP3Mk-;I"
    "c)+?malHKi^egc|vgx6OWuMu>0Ij0wDW?`sMB+|Wn6myWY$`#wt~=2U2LdX;&>$AP4LNk{?~l_krndy#"
    "Yk2pR@3Vb9EZ4`eB(3hB0%K#mdScLmnH`2tDPA#^LL;|jg%?N0r;AHZIRd?9RFJE7mNS7iZnrch`>PS~"
    "7#H2!;Gi@sZ}Z#Lh=)E~+HC$Lkc^H@M2Y&!*D!+Z1HTkLIa`@^5E4UVFelNmycpaL9GRn$8hhHlGmf3y"
    "EwGby!&@%JHy37=r*yu~p6{lDLoZ6&2X>7=x|`x1(iB}`Tb>B;ELXzSk-VW?dNM1ya$wYNcHfW*{i{>1"
    "#%@+?5Y`AYWM9SHdqOqYoJ5M_Qa?;KzV^!-V+s-b9o@dUY7*z46y!*8w-hocou*Xvn#V&i&`I_;u}{vh"
    "?a;;W-580lHu<(biO=)U8JwE-4KN%2Rg*C3(lb7@yMhfG*}SmsDr7S7(sQ*ru(w=7_g&71cxpwWIDQ`^"
    "$vyO_at6WYID_-nb698+&(=DNJ_6y_b?>R;WOAV=mES7n)sg{L`?yxp@=W#2id)X<*a2@pg8ulOB1Hb{"
    ")7V3**sG~m!Os~JE|jFw"
)


def test_streams_with_a_filter_they_may_not_have_are_refused():
    codes = rows_of_a_classifier(300, 400, 1.5)
    data = encode(codes)
    for place in RANDOM.integers(0, len(data), 20):
        broken = bytearray(data)
        broken[place] ^= 1 << int(RANDOM.integers(0, 8))
        with pytest.raises(PackedFileError, match="a stream of codes is damaged"):
            decode(bytes(broken), codes.shape)
    with pytest.raises(PackedFileError, match="damaged: a filter of 1200 rows"):
        decode(data, (1200, 100))
    with pytest.raises(PackedFileError, match="damaged: a filter of 300 rows"):
        decode(data, (300, 100, 2, 2))
    with pytest.raises(PackedFileError, match="damaged: a filter for 1024000 codes"):
        decode(data, (1000, 1024))


def test_damaged_streams_are_refused():
    codes = LAYERS["convolution"]
    data = encode(codes)
    for length in range(0, len(data), 4 * 97):
        with pytest.raises(PackedFileError, match="cannot hold|is damaged"):
            decode(data[:length], codes.shape)
    for place in RANDOM.integers(0, len(data), 60):
        broken = bytearray(data)
        broken[place] ^= 1 << int(RANDOM.integers(0, 8))
        with pytest.raises(PackedFileError, match="a stream of codes is damaged"):
            decode(bytes(broken), codes.shape)
    for shape in ((41, 24, 3, 3), (39, 24, 3, 3), (40, 24 * 9)):
        with pytest.raises(PackedFileError, match="is damaged"):
            decode(data, shape)
    with pytest.raises(PackedFileError, match="is damaged: it does not end"):
        decode(data + bytes(8), codes.shape)
    with pytest.raises(PackedFileError, match="of 13 bytes cannot hold 4 codes"):
        decode(bytes(13), (2, 2))
    with pytest.raises(PackedFileError, match="cannot hold 1000000000000 codes"):
        decode(data, (1000000, 1000000))


def test_hostile_streams_end_quickly():
    start = time.process_time()
    for _ in range(300):
        data = RANDOM.bytes(4 * int(RANDOM.integers(1, 40)))
        with pytest.raises(PackedFileError):
            decode(data, (16, 4, 3, 3))
    assert time.process_time() - start < 3
