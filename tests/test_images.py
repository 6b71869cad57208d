"""Image files, and augmented views of images."""

import logging

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from nets import images as pictures
from ompq.datasets.images import decode_image, find_images, image_views, normalise
from ompq.errors import DataError, SampleError
from ompq.models.named_models import NamedModel


def takes(channels=3, side=8, resize=8):
    values = (0.5,) * channels
    return NamedModel(
        nn.Identity(), "net", (channels, side, side), values, values, resize
    )


def picture(path, size=(8, 8), seed=0):
    """Write a lossless image and return its pixels, (height, width, 3)."""
    shape = (size[1], size[0], 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return pixels


def test_class_folders_are_classes_in_sorted_order(tmp_path):
    for name in ("dog/b.png", "dog/a.png", "cat/deeper/c.PNG", ".hidden/d.png"):
        picture(tmp_path / name)
    (tmp_path / "dog" / "notes.txt").touch()
    (tmp_path / "dog" / "._a.png").touch()
    found = find_images(tmp_path, "test")
    assert [str(f.relative_to(tmp_path)) for f in found.files] == [
        "cat/deeper/c.PNG",
        "dog/a.png",
        "dog/b.png",
    ]
    assert found.targets == (0, 1, 1)
    assert found.classes == ("cat", "dog")
    assert not found.numbered


def test_numbered_folders_are_class_indices_though_some_are_missing(tmp_path):
    for name in ("0002", "0010", "0000"):
        picture(tmp_path / name / "x.png")
    found = find_images(tmp_path, "test")
    assert found.targets == (0, 2, 10)
    assert found.numbered
    assert len(found.classes) == 11


def test_images_alone_have_no_classes(tmp_path):
    picture(tmp_path / "b.png")
    picture(tmp_path / "a.png")
    found = find_images(tmp_path, "test")
    assert [f.name for f in found.files] == ["a.png", "b.png"]
    assert found.targets is None


def test_class_without_images_keeps_its_index(tmp_path, caplog):
    picture(tmp_path / "c" / "x.png")
    (tmp_path / "a").mkdir()
    with caplog.at_level(logging.WARNING):
        found = find_images(tmp_path, "test")
    assert found.targets == (1,)
    assert "1 classes have no images: a" in caplog.text


@pytest.mark.parametrize("name", ["test", "val", "valid", "validation"])
def test_folder_of_splits_gives_the_one_asked_for(tmp_path, name):
    picture(tmp_path / "train" / "a" / "x.png")
    picture(tmp_path / name / "a" / "y.png")
    assert [f.name for f in find_images(tmp_path, "train").files] == ["x.png"]
    assert [f.name for f in find_images(tmp_path, "test").files] == ["y.png"]


def test_split_that_is_not_there(tmp_path):
    picture(tmp_path / "train" / "a" / "x.png")
    with pytest.raises(DataError, match="has no test images: it holds train"):
        find_images(tmp_path, "test")


def test_folders_without_images(tmp_path):
    with pytest.raises(DataError, match="there is no folder .*nowhere; give a folder"):
        find_images(tmp_path / "nowhere", "test")
    with pytest.raises(DataError, match="holds nothing; give a folder with images"):
        find_images(tmp_path, "test")
    (tmp_path / "readme.txt").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no images; give"):
        find_images(tmp_path, "test")
    with pytest.raises(DataError, match="readme.txt is a file; unpack it"):
        find_images(tmp_path / "readme.txt", "test")


def test_images_beside_class_folders_are_refused(tmp_path):
    picture(tmp_path / "stray.png")
    picture(tmp_path / "cat" / "x.png")
    with pytest.raises(DataError, match="holds 1 images next to class folders"):
        find_images(tmp_path, "test")


def test_image_of_the_input_size_is_taken_as_it_is(tmp_path):
    pixels = picture(tmp_path / "x.png")
    decoded = decode_image(tmp_path / "x.png", takes(resize=16))
    assert decoded.dtype == torch.uint8
    assert np.array_equal(decoded.permute(1, 2, 0).numpy(), pixels)


def test_larger_image_is_cropped_at_its_centre(tmp_path):
    pixels = picture(tmp_path / "x.png", (16, 12))
    decoded = decode_image(tmp_path / "x.png", takes(resize=12))
    assert np.array_equal(decoded.permute(1, 2, 0).numpy(), pixels[2:10, 4:12])


def test_image_is_resized_by_its_shorter_side_or_squashed(tmp_path):
    picture(tmp_path / "x.png", (40, 20))
    with Image.open(tmp_path / "x.png") as image:
        shorter = image.resize((20, 10), Image.Resampling.BILINEAR).crop((6, 1, 14, 9))
        squashed = image.resize((8, 8), Image.Resampling.BILINEAR)
    decoded = decode_image(tmp_path / "x.png", takes(resize=10))
    assert np.array_equal(decoded.permute(1, 2, 0).numpy(), np.asarray(shorter))
    decoded = decode_image(tmp_path / "x.png", takes(resize=(8, 8)))
    assert np.array_equal(decoded.permute(1, 2, 0).numpy(), np.asarray(squashed))


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "CMYK"])
def test_other_kinds_of_image_become_rgb_or_grey(tmp_path, mode):
    pixels = picture(tmp_path / "x.png")
    path = tmp_path / ("y.tif" if mode == "CMYK" else "y.png")
    Image.fromarray(pixels).convert(mode).save(path)
    assert decode_image(path, takes(3)).shape == (3, 8, 8)
    assert decode_image(path, takes(1)).shape == (1, 8, 8)


def test_transparent_palette_gives_no_warning(tmp_path):
    image = Image.fromarray(picture(tmp_path / "x.png")).convert("P")
    image.save(tmp_path / "y.png", transparency=bytes(range(256)))
    assert decode_image(tmp_path / "y.png", takes()).shape == (3, 8, 8)


def test_sixteen_bit_image_is_scaled_not_clipped(tmp_path):
    values = (np.arange(64, dtype=np.uint16) * 1000).reshape(8, 8)
    Image.fromarray(values).save(tmp_path / "x.png")
    decoded = decode_image(tmp_path / "x.png", takes())
    assert np.abs(decoded[0].numpy() - values / 256).max() <= 1


def test_damaged_image_is_named(tmp_path):
    picture(tmp_path / "x.png", (64, 64))
    data = (tmp_path / "x.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(data[: len(data) // 2])
    with pytest.raises(
        DataError, match=r"cut.png cannot be read as an image \(OSError"
    ):
        decode_image(tmp_path / "cut.png", takes())
    (tmp_path / "text.jpg").write_text("not an image")
    with pytest.raises(DataError, match="text.jpg cannot be read as an image"):
        decode_image(tmp_path / "text.jpg", takes())
    (tmp_path / "empty.jpg").touch()
    with pytest.raises(DataError, match="empty.jpg cannot be read as an image"):
        decode_image(tmp_path / "empty.jpg", takes())


def test_network_with_other_channels_cannot_take_images(tmp_path):
    picture(tmp_path / "x.png")
    with pytest.raises(DataError, match="net takes 5 channels, but images have 1 or 3"):
        decode_image(tmp_path / "x.png", takes(5))


def test_normalisation_is_that_of_the_network():
    model = NamedModel(nn.Identity(), "net", (2, 1, 2), (0.1, 0.2), (0.5, 0.25), 2)
    pixels = torch.tensor([[[[0, 255]], [[51, 102]]]], dtype=torch.uint8)
    expected = [(0 - 0.1) / 0.5, (1 - 0.1) / 0.5, (0.2 - 0.2) / 0.25, 0.2 / 0.25]
    assert normalise(pixels, model).flatten().tolist() == pytest.approx(
        expected, abs=1e-6
    )
    assert pixels[0, 0, 0, 1] == 255


def test_images_come_first_and_views_are_windows_of_them():
    given = pictures(6)
    found = image_views(given, 4)
    assert found.shape == (24, *given.shape[1:])
    assert torch.equal(found[:6], given)
    side = given.shape[-1]
    shift = side // 8
    wide = torch.nn.ReflectionPad2d(shift)(given)
    steps = range(2 * shift + 1)
    seen = set()
    for number, view in enumerate(found[6:]):
        windows = {
            (top, left, flip): window.flip(-1) if flip else window
            for top in steps
            for left in steps
            for flip in (False, True)
            for window in [wide[number % 6, :, top : top + side, left : left + side]]
        }
        matches = [key for key, window in windows.items() if torch.equal(window, view)]
        assert matches
        seen.add(matches[0])
    assert len(seen) > 4  # not always the same
    assert not torch.equal(found[6:12], found[12:18])


def test_views_follow_the_seed_and_one_view_changes_nothing():
    given = pictures(4)
    assert torch.equal(image_views(given, 3), image_views(given, 3))
    other = image_views(given, 3, seed=1)
    assert not torch.equal(image_views(given, 3), other)
    assert torch.equal(image_views(given, 1), given)


def test_what_is_no_image_is_refused():
    with pytest.raises(ValueError, match="views=0 must be at least 1"):
        image_views(pictures(2), 0)
    words = r"samples of shape \(3, 4\) and torch.float32 are not images"
    with pytest.raises(SampleError, match=words):
        image_views(torch.zeros(3, 4), 2)
    words = "torch.int64 are not images: views need floats"
    with pytest.raises(SampleError, match=words):
        image_views(torch.zeros(1, 1, 4, 4, dtype=torch.int64), 2)


def test_views_of_several_inputs_are_refused():
    with pytest.raises(SampleError, match="samples are tuple; views need images"):
        image_views((torch.zeros(2, 3, 4, 4),), 2)
