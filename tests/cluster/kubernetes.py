"""The Jobs of docs/cluster/kubernetes: valid by Kubernetes' schemas, and run here index by index as a cluster would, with pods
that die, to the same bytes as one run.

    python kubernetes.py COLICONV REPOSITORY

Wants PyPI's kubernetes-validate. There is no cluster here: what is run is the containers' own command with the environment that
an indexed Job gives them.
"""

import filecmp
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import kubernetes_validate
import yaml

VERSIONS = ["1.33", kubernetes_validate.latest_version()]


def job(path):
    """A Job that every one of the versions takes."""
    document = yaml.safe_load(path.read_text())
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)
    return document


def pod(document, data, index, bin_path, killed=False):
    """Runs one pod's command; `killed` kills it with all it has started, as a node that goes away does."""
    [container] = document["spec"]["template"]["spec"]["containers"]
    env = {item["name"]: item["value"] for item in container.get("env", [])}
    if index is not None:
        env["JOB_COMPLETION_INDEX"] = str(index)
    command = [*container["command"], *(text.replace("/data", str(data)) for text in container["args"])]
    env = {**os.environ, **env, "PATH": f"{bin_path}:{os.environ['PATH']}"}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if killed:
        try:
            process.wait(0.015)
        except subprocess.TimeoutExpired:
            process.kill()
    out, _ = process.communicate()
    return process.returncode, out


def indexed(document, data, bin_path):
    """Every index, some pods killed first and started again."""
    completions = document["spec"]["completions"]
    assert document["spec"]["completionMode"] == "Indexed"
    for index in range(completions):
        if index % 3 == 1:
            pod(document, data, index, bin_path, killed=True)
    for index in reversed(range(completions)):
        code, out = pod(document, data, index, bin_path)
        assert code == 0, out


def same(one, other):
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir()), (names, list(other.iterdir()))
    _, wrong, errors = filecmp.cmpfiles(one, other, names, shallow=False)
    assert not wrong and not errors, (wrong, errors)


def same_but_for_paths(reports, key):
    """Whether two reports, of the containers `single` and `container`, say the same."""
    texts = [json.dumps(report[key]).replace("/data/single", "/data/container") for report in reports]
    return texts[0] == texts[1]


def main(coliconv, repository):
    folder, nano = Path(repository) / "docs/cluster/kubernetes", Path(repository) / "fixtures/nano"
    names = ["convert.yaml", "verify.yaml", "score.yaml", "finish-verify.yaml", "finish.yaml"]
    assert sorted(names) == sorted(path.name for path in folder.iterdir()), "every file is looked at"
    convert, verify, score, finish_verify, finish = (job(folder / name) for name in names)
    for document in [convert, verify, score]:
        env = {item["name"]: item["value"] for item in document["spec"]["template"]["spec"]["containers"][0]["env"]}
        assert int(env["COLICONV_PARTS"]) == document["spec"]["completions"]
    with tempfile.TemporaryDirectory() as directory:
        data, bin_path = Path(directory) / "data", Path(directory) / "bin"
        bin_path.mkdir()
        (bin_path / "coliconv").symlink_to(Path(coliconv).resolve())
        shutil.copytree(nano, data / "checkpoint")
        for name, rows in [("gloss.jsonl", 10), ("heldout.txt", 6)]:
            lines = (nano / "expected" / name).read_text().splitlines(keepends=True)
            (data / name).write_text("".join(lines[:rows]))
        shutil.copy(nano / "expected" / "tokens-g64-mtp-indexer.json", data / "reference.json")
        inputs = ["--task", f"gloss={data}/gloss.jsonl", "--text", f"heldout={data}/heldout.txt"]

        def run(*arguments):
            subprocess.run([coliconv, *map(str, arguments), "--quiet"], check=True, stdout=subprocess.DEVNULL)

        run("convert", data / "checkpoint", data / "single", "--group-size", "64", "--mtp", "--indexer")
        indexed(convert, data, bin_path)
        same(data / "single", data / "container")

        against = ["--source", data / "checkpoint", "--reference", data / "reference.json"]
        run("verify", data / "single", *against, "--report", data / "whole.json")
        indexed(verify, data, bin_path)
        code, out = pod(finish_verify, data, None, bin_path)
        assert code == 0, out
        reports = [json.loads((data / name).read_text()) for name in ["whole.json", "verify.json"]]
        for key in set(reports[0]) - {"path", "seconds", "experts"}:
            assert same_but_for_paths(reports, key), key

        run("score", data / "checkpoint", *inputs, "--out", data / "source-scores")
        run("score", data / "single", *inputs, "--baseline", data / "source-scores", "--out", data / "single-scores")
        indexed(score, data, bin_path)
        code, out = pod(finish, data, None, bin_path)
        assert code == 0, out
        results = [(data / name / "results.jsonl").read_bytes() for name in ["single-scores", "scores"]]
        assert results[0] == results[1], "the parts of the scores are joined exactly"
        reports = [json.loads((data / name / "score.json").read_text()) for name in ["single-scores", "scores"]]
        for key in ["model_sha256", "inputs", "tasks", "texts", "requests", "excluded"]:
            assert reports[0][key] == reports[1][key], key
    print(f"five Jobs are valid for Kubernetes {' and '.join(VERSIONS)}, and their parts make what one run makes")


if __name__ == "__main__":
    main(*sys.argv[1:])
