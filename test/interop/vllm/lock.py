"""Writes the hashes into the requirements files: for each pin, the wheels that the supported Pythons take on Linux x86-64.

    python lock.py requirements-torch.txt requirements.txt requirements-guidellm.txt

Pins are changed by hand, then locked again. `pip check` in the new environment
tells what a changed pin misses; what is left out on purpose is in README.md.
"""

import json
import re
import subprocess
import sys
import tempfile

PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(36, 4, -1)] + ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]


def name(project):
    return re.sub(r"[-_.]+", "-", project).lower()


def wheels(pins, python):
    """The sha256 of the wheel of each pin by its name."""
    with tempfile.TemporaryDirectory() as work:
        with open(work + "/pins.txt", "w") as f:
            f.write("\n".join(pins))
        platforms = [arg for p in PLATFORMS for arg in ("--platform", p)]
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps", "--only-binary", ":all:"]
            + ["--target", work, "--python-version", python, *platforms, "--report", work + "/report.json", "-r", work + "/pins.txt"],
            check=True,
        )
        with open(work + "/report.json") as f:
            report = json.load(f)
    return {name(i["metadata"]["name"]): i["download_info"]["archive_info"]["hashes"]["sha256"] for i in report["install"]}


def lock(file):
    with open(file) as f:
        lines = f.read().splitlines()
    head = [line for line in lines if line.startswith(("#", "-r "))]
    pins = sorted((line.split()[0] for line in lines if "==" in line and not line.startswith("#")), key=name)
    found = [wheels(pins, python) for python in PYTHONS]
    with open(file, "w") as f:
        f.write("\n".join(head) + "\n")
        for pin in pins:
            f.write(pin + "".join(f" \\\n    --hash=sha256:{h}" for h in sorted({w[name(pin.split("==")[0])] for w in found})) + "\n")


for file in sys.argv[1:]:
    lock(file)
