"""What huggingface_hub makes of a published container: sizes, SHA-256, git's ids and the split of the upload must be those
of the upload plan, and listings in the library's own words must be read.

    python agrees.py COLICONV CONTAINER [RECORD]

RECORD is a file for the listing in the library's words, see fixtures/hub. Nothing goes to the network.
"""

import dataclasses
import json
import os
import shlex
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import CommitOperationAdd
from huggingface_hub._commit_api import _prepare_commit_payload
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import filter_repo_objects
from huggingface_hub.utils.sha import git_hash, sha_fileobj

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize {}\n"


def main(coliconv, container, record=None):
    container = Path(container).resolve()
    plan = json.loads(container.with_name(container.name + ".upload-plan.json").read_text())
    there = sorted(path.name for path in container.iterdir() if path.is_file())
    assert sorted(file["name"] for file in plan["files"]) == there, "the plan names every file"

    tree = []
    for file in plan["files"]:
        path = container / file["name"]
        operation = CommitOperationAdd(path_in_repo=file["name"], path_or_fileobj=str(path))
        info = operation.upload_info
        assert (info.size, info.sha256.hex()) == (file["bytes"], file["sha256"]), file
        with path.open("rb") as opened:
            assert sha_fileobj(opened).hex() == file["sha256"], file
        lfs = file["storage"] == "lfs"
        operation._upload_mode = "lfs" if lfs else "regular"
        payload = list(_prepare_commit_payload([operation], files_to_copy={}, commit_message="x"))
        [value] = [item["value"] for item in payload if item["key"] in ("lfsFile", "file")]
        entry = {"type": "file", "path": file["name"], "size": file["bytes"]}
        if lfs:
            assert (value["oid"], value["size"]) == (file["sha256"], file["bytes"]), value
            pointer = POINTER.format(file["sha256"], file["bytes"]).encode()
            entry["oid"] = git_hash(pointer)
            entry["lfs"] = {"oid": file["sha256"], "size": file["bytes"], "pointerSize": len(pointer)}
            entry["xetHash"] = "0" * 64
        else:
            assert git_hash(path.read_bytes()) == file["git_blob_id"], file
            entry["oid"] = file["git_blob_id"]
        tree.append(entry)

    # What the two commands of the plan upload: everything once, config.json and the manifest last.
    names = [file["name"] for file in plan["files"]]
    excluded, included = (given(step, flag) for step, flag in zip(plan["steps"], ["--exclude", "--include"]))
    # A lock that a killed run left behind is no file of the model.
    first = list(filter_repo_objects([*names, ".coliconv.lock"], ignore_patterns=excluded))
    second = list(filter_repo_objects(names, allow_patterns=included))
    assert first + second == names and second[-2:] == ["config.json", "coliconv.manifest.json"], (first, second)

    # The library's program has these commands with these options.
    for step in plan["steps"][:2]:
        _, subcommand, *words = shlex.split(step["command"])
        told = subprocess.run([Path(sys.executable).with_name("hf"), subcommand, "--help"], capture_output=True, text=True)
        assert told.returncode == 0, told.stderr
        assert all(word in told.stdout for word in words if word.startswith("--")), step["command"]

    listed = [dataclasses.asdict(RepoFile(**dict(entry))) for entry in tree]
    with tempfile.TemporaryDirectory() as directory:
        for listing, code in [(tree, 0), (listed, 0), (listed[1:], 1), (changed(listed), 1)]:
            path = Path(directory) / "listing.json"
            path.write_text(json.dumps(listing))
            command = [coliconv, "publish", container, "--check-listing", path, "--quiet"]
            ran = subprocess.run(command, capture_output=True, text=True)
            assert ran.returncode == code, ran.stdout + ran.stderr
    if record:
        Path(record).write_text(json.dumps(listed, indent=1) + "\n")
    print(f"huggingface_hub {version('huggingface_hub')} agrees on {len(names)} files")


def given(step, flag):
    """What a command gives to a flag, as often as it stands there."""
    words = shlex.split(step["command"])
    return [value for word, value in zip(words, words[1:]) if word == flag]


def changed(listed):
    """The same listing with one digit of one SHA-256 changed."""
    copy = json.loads(json.dumps(listed))
    lfs = next(file["lfs"] for file in copy if file["lfs"])
    lfs["sha256"] = ("1" if lfs["sha256"][0] == "0" else "0") + lfs["sha256"][1:]
    return copy


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main(*sys.argv[1:])
