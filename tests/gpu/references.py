#!/usr/bin/env python3
"""Every reference of the fixtures on one device, through the command line.

    tests/gpu/references.py COLICONV DEVICE          for one: target/release/coliconv cuda
    tests/gpu/references.py COLICONV DEVICE least    with the least of the device's memory that is taken: one expert at a time
    tests/gpu/references.py COLICONV DEVICE fast     in the fast mode
    tests/gpu/references.py COLICONV DEVICE OTHER    beside another device: target/release/coliconv cuda:0,0 cuda

Converts the fixtures as their references want it, lets the device verify them, and fails unless every token is exact,
every log-probability is within 1e-4 of the CPU's, generated text does not depend on the number of drafts, and the device
was really used. With another device every bit of its log-probabilities must be that of the first. In the fast mode, where a rounding
may change which expert or position is chosen, 98 of 100 predictions of all references together must be theirs, and of the CPU's
own texts log-probabilities may be off by 0.05. Needs nothing but Python's standard library.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FIXTURES = Path(__file__).resolve().parent.parent.parent / "fixtures"
LEAST, FAST = sys.argv[3:] == ["least"], sys.argv[3:] == ["fast"]
LOGPROB_TOLERANCE = 0.05 if FAST else 1e-4
PREDICTIONS_NEAR = 0.98
PREDICTIONS = [0, 0]


def run(*command: object) -> dict:
    """The JSON document that a command prints; its exit code beside it."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    try:
        document = json.loads(done.stdout)
    except ValueError:
        sys.exit(f"{' '.join(map(str, command))}\nexit {done.returncode}\n{done.stdout}{done.stderr}")
    return document | {"exit": done.returncode}


def run_on(device: str, *command: object) -> dict:
    """The same on the device, if it is asked for with the least of its memory, or in the fast mode."""
    command = (*command, "--device", device, *(["--mode", "fast"] if FAST else []))
    if LEAST:
        refused = run(*command, "--device-memory", 1)["refused"][0]["message"]
        command = (*command, "--device-memory", re.search(r"needs (\d+) bytes", refused)[1])
    document = run(*command)
    if LEAST and not document.get("device_experts", {}).get("evictions"):
        sys.exit(f"{' '.join(map(str, command))}\nno expert had to go: {document.get('device_experts')}")
    return document


def files_of(fixture: Path) -> dict[str, list[Path]]:
    """Reference files by the container that they are for."""
    files: dict[str, list[Path]] = {}
    for path in sorted((fixture / "expected").glob("*-*.json")):
        what, _, rest = path.stem.partition("-")
        name = rest.partition("-")[2] if what == "dsa" else rest
        if what in ("tokens", "mtp", "dsa"):
            files.setdefault(name, []).append(path)
    return files


def wrong_with(entry: dict, reference: dict) -> list[str]:
    """What of a report's entry is not exact."""
    wrong = [] if FAST else tokens_wrong_with(entry, reference)
    gpu = entry["gpu"]
    if not gpu or not gpu["dispatches"] or gpu["fallbacks"]:
        wrong.append(f"the device was not used: {gpu}")
    return wrong


def tokens_wrong_with(entry: dict, reference: dict) -> list[str]:
    """Which tokens of a report's entry are not exact, and whether log-probabilities are."""
    wrong = []
    if (forced := entry["teacher_forced"]) and forced["matched"] != forced["total"]:
        wrong.append(f"teacher-forced {forced}")
    if (greedy := entry["greedy"]) and greedy["matched"] != greedy["total"]:
        wrong.append(f"greedy {greedy}")
    if (drafts := entry["mtp"]) and (drafts["matched"], drafts["accepted"]) != (drafts["total"], reference["hits_over_greedy"]):
        wrong.append(f"drafts {drafts}")
    if (entry["max_abs_logprob_diff"] or 0) > LOGPROB_TOLERANCE:
        wrong.append(f"log-probabilities {entry['max_abs_logprob_diff']}")
    return wrong


def verified(coliconv: str, device: str, model: Path, references: list[Path]) -> list[str]:
    """What is wrong with a model on the device."""
    flags = [flag for path in references for flag in ("--reference", path)]
    report = run_on(device, coliconv, "verify", model, "--json", *flags)
    failed = [check for check in report.get("checks", []) if check["status"] == "fail"]
    is_near = FAST and all(check["name"] == "tokens" for check in failed)
    wrong = [] if report["exit"] == 0 or is_near else [f"exit {report['exit']}: {failed}"]
    by_path = {str(path): json.loads(path.read_text()) for path in references}
    for entry in report.get("tokens", []):
        file = by_path[entry["reference"]]
        reference = file.get("references", [file])[entry["number"]]
        wrong += [f"{Path(entry['reference']).name} {entry['number']}: {what}" for what in wrong_with(entry, reference)]
    forced = [entry["teacher_forced"] for entry in report.get("tokens", []) if entry["teacher_forced"]]
    equal, total = (sum(of[what] for of in forced) for what in ("matched", "total"))
    PREDICTIONS[0] += equal
    PREDICTIONS[1] += total
    print(f"  {len(report.get('tokens', []))} references, {len(wrong)} wrong, {equal} of {total} predictions", flush=True)
    return wrong


def beside_cpu(coliconv: str, device: str, model: Path, folder: Path, drafts: bool) -> list[str]:
    """The CPU's own texts, and texts with any number of drafts."""
    own = folder / "own.json"
    own.unlink(missing_ok=True)
    written = run(coliconv, "verify", model, "--json", "--write-reference", own)
    wrong = [] if written["exit"] == 0 else [f"--write-reference: exit {written['exit']}"]
    report = run_on(device, coliconv, "verify", model, "--json", "--reference", own)
    apart = [entry["max_abs_logprob_diff"] for entry in report["tokens"]]
    print(f"  log-probabilities within {max(filter(None, apart), default=None)} of the CPU's", flush=True)
    wrong += [f"beside the CPU: {entry}" for entry in report["tokens"] if (entry["max_abs_logprob_diff"] or 0) > LOGPROB_TOLERANCE]
    wrong += [] if report["exit"] == 0 else [f"beside the CPU: exit {report['exit']}"]
    said = []
    for count in range(0, 7) if drafts else [0]:
        flags = ["--prompt", "In the beginning", "--max-tokens", 40, "--draft", count, "--json"]
        said.append(run_on(device, coliconv, "generate", model, *flags))
    if not FAST:
        said.append(run(coliconv, "generate", model, "--prompt", "In the beginning", "--max-tokens", 40, "--json"))
    if any(one.get("ids") != said[0].get("ids") for one in said):
        wrong.append(f"generated texts differ: {[one.get('ids') for one in said]}")
    return wrong


def beside(coliconv: str, device: str, other: str, model: Path, folder: Path) -> list[str]:
    """Log-probabilities that are not those of another device, bit for bit."""
    own = folder / "other.json"
    own.unlink(missing_ok=True)
    written = run(coliconv, "verify", model, "--device", other, "--json", "--write-reference", own)
    report = run(coliconv, "verify", model, "--device", device, "--json", "--reference", own)
    if written["exit"] or report["exit"]:
        return [f"beside {other}: exit {written['exit']}, then {report['exit']}"]
    apart = [entry["max_abs_logprob_diff"] for entry in report["tokens"]]
    counted = [[gpu["dispatches"] for gpu in entry["gpu"]["devices"]] for entry in report["tokens"]]
    print(f"  {len(apart)} texts beside {other}: apart {set(apart)}, operations of each GPU {counted}", flush=True)
    return [f"beside {other}: log-probabilities differ by {one}" for one in apart if one != 0.0]


def main() -> None:
    coliconv, device, *others = [one for one in sys.argv[1:] if one not in ("least", "fast")]
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for fixture in (FIXTURES / "nano", FIXTURES / "tiny"):
            flags = json.loads((fixture / "expected" / "bare.json").read_text())
            for name, references in files_of(fixture).items():
                print(f"{fixture.name} {name}", flush=True)
                model = fixture
                if name != "source":
                    model = Path(folder) / f"{fixture.name}-{name}"
                    made = run(coliconv, "convert", fixture, model, "--json", *flags[name]["flags"])
                    if made["exit"] != 0:
                        sys.exit(f"convert: {made}")
                found = verified(coliconv, device, model, references)
                has_head = name == "source" or "--mtp" in flags[name]["flags"]
                found += beside_cpu(coliconv, device, model, Path(folder), has_head)
                for other in others:
                    found += beside(coliconv, device, other, model, Path(folder))
                wrong += [f"{fixture.name} {name}: {what}" for what in found]
    if FAST and PREDICTIONS[0] < PREDICTIONS_NEAR * PREDICTIONS[1]:
        wrong.append(f"{PREDICTIONS[0]} of {PREDICTIONS[1]} predictions are those of the references")
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"every reference is {'near' if FAST else 'exact'} on {device}")


if __name__ == "__main__":
    main()
