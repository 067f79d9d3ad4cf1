"""What vouches for a checkpoint notices every change, and says which file and what."""

import json

import pytest

from posttrain.training import manifest
from posttrain.training.manifest import MANIFEST, Manifest


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rank_00000.safetensors").write_bytes(bytes(range(200)))
    (tmp_path / "rank_00000.json").write_text('{"torch": ""}')
    files = {path.name: manifest.signature(path) for path in tmp_path.iterdir()}
    about = dict(step=7, model="qwen3", parameters=3, world_size=1, evaluation={"eval/reward": 0.5}, fingerprints={})
    manifest.write(tmp_path, Manifest(files=files, **about))
    return tmp_path


def complaints(folder):
    found = manifest.read(folder)
    if isinstance(found, str):
        return [found]
    return [said for name, promised in found.files.items() if (said := manifest.wrong(folder, name, promised))]


def test_what_is_as_it_was_written(folder):
    assert complaints(folder) == [] and manifest.read(folder).step == 7


@pytest.mark.parametrize("name", ["rank_00000.safetensors", "rank_00000.json", MANIFEST])
def test_every_byte_of_every_file_is_vouched_for(folder, name):
    whole = (folder / name).read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        # Of JSON another digit is still JSON, and of text another letter is still text.
        damaged[place] ^= 1
        (folder / name).write_bytes(damaged)
        assert len(found := complaints(folder)) == 1 and name in found[0], (place, damaged[place - 5 : place + 5])


def test_what_is_missing_or_cut_off(folder):
    (folder / "rank_00000.json").unlink()
    with (folder / "rank_00000.safetensors").open("r+b") as file:
        file.truncate(100)
    assert complaints(folder) == ["rank_00000.json is missing", "rank_00000.safetensors has 100 bytes of 200"]


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"step": 1}', "{", "\0" * 40, "ÿ"])
def test_a_manifest_that_is_none(folder, text):
    (folder / MANIFEST).write_bytes(text.encode("latin-1"))
    (said,) = complaints(folder)
    assert said.startswith(f"{MANIFEST} ")


def test_a_manifest_of_another_format(folder):
    values = json.loads((folder / MANIFEST).read_text()) | {"format": 9}
    (folder / MANIFEST).write_text(json.dumps(values))
    assert complaints(folder) == [f"{MANIFEST} is of format 9, and this version reads {manifest.FORMAT}"]
