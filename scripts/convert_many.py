"""Convert a table of checkpoints with each of some recipes, as jobs of a Slurm cluster or of this machine.

    python scripts/convert_many.py table.csv --recipe default --recipe linear --out hybrids/ [--cluster slurm]

The table has the columns ``name``, ``model`` and ``calib``, as ``latte convert`` takes them, and a row for each
checkpoint. submitit (``pip install "latte-convert[many]"``) queues the jobs, runs them and keeps their output in
``hybrids/jobs/``. Each writes ``hybrids/NAME-RECIPE/``, and keeps its work in ``hybrids/work/NAME/``: what is there
is not done again when the same command is run again, and the recipes of one checkpoint share what is the same in them.
``latte report`` then puts all artifacts on one page, ``hybrids/report.html``. A job that fails is named with its
reason, and the exit code is 1; the others are finished all the same.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import NamedTuple

import submitit


class Job(NamedTuple):
    """One checkpoint with one recipe."""

    name: str
    model: str
    calib: str
    recipe: str
    out: Path

    @property
    def artifact(self) -> Path:
        """What it writes."""
        return self.out / f"{self.name}-{Path(self.recipe).stem}"


def convert(job: Job) -> str:
    """What a job does, wherever it runs: the library call."""
    import latte_convert

    result = latte_convert.convert(
        job.model,
        job.calib,
        recipe=latte_convert.Recipe.from_yaml(job.recipe),
        work=job.out / "work" / job.name,
        progress=False,
    )
    result.save(job.artifact)
    return repr(result)


def read_table(table: Path, recipes: list[str], out: Path) -> list[Job]:
    """Every row with every recipe; what has an artifact is left out."""
    with table.open(newline="") as file:
        rows = [(row["name"], row["model"], row["calib"]) for row in csv.DictReader(file)]
    jobs = [Job(*row, recipe, out) for row, recipe in product(rows, recipes)]
    if len({job.artifact for job in jobs}) < len(jobs):
        sys.exit("two jobs have the same name: names in the table, and of recipe files, tell artifacts apart.")
    return jobs


def run(jobs: list[Job], options: argparse.Namespace) -> dict[Job, str]:
    """Run jobs on a cluster; why each failed that did."""
    executor = submitit.AutoExecutor(folder=options.out / "jobs", cluster=options.cluster)
    executor.update_parameters(timeout_min=options.minutes, cpus_per_task=options.cpus)
    together = len(jobs)
    if options.cluster == "slurm":
        executor.update_parameters(slurm_array_parallelism=options.at_once, slurm_partition=options.partition)
    else:
        together = options.at_once  # this machine has no queue
    failed = {}
    for start in range(0, len(jobs), max(1, together)):
        wave = jobs[start : start + together]
        for job, submitted in zip(wave, executor.map_array(convert, wave), strict=True):
            if (error := submitted.exception()) is None:
                print(f"{job.artifact}\n{submitted.result()}", file=sys.stderr)
            else:
                failed[job] = (submitted.stderr() or str(error)).strip().splitlines()[-1]
    return failed


def main() -> None:
    """Convert what is missing, gather the reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--recipe", action="append", required=True, help="a recipe file, or default, linear, paper")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cluster", choices=["local", "slurm"], default="local")
    parser.add_argument("--partition", help="of a Slurm cluster")
    parser.add_argument("--at-once", type=int, default=1, help="jobs that run at the same time")
    parser.add_argument("--cpus", type=int, default=2, help="of each job")
    parser.add_argument("--minutes", type=int, default=24 * 60, help="after which a job is ended")
    options = parser.parse_args()
    options.out = options.out.absolute()
    jobs = read_table(options.table, options.recipe, options.out)
    failed = run([job for job in jobs if not job.artifact.exists()], options)
    for job, reason in failed.items():
        print(f"{job.artifact.name}: {reason}", file=sys.stderr)
    done = [str(job.artifact) for job in jobs if job.artifact.exists()]
    if done:
        page = str(options.out / "report.html")
        report = [sys.executable, "-m", "latte_convert", "report", *done, "--out", page, "--overwrite"]
        subprocess.run(report, check=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
