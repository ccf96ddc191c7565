"""For mkdocs: the site's pages are the repository's own Markdown files in their own places, so that their links hold in both."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("*.md", "docs/*.md", "benchmarks/*.md", "examples/**/*.md", "compat/deepspeed/README.md")
LINKED = (
    *("LICENSE", "docs/*.svg", "examples/**/*.py", "examples/**/*.json", "tests/unit/test_import_rule.py"),
    *("examples/deploy/**/*.y*ml", "examples/deploy/slurm.sbatch", "examples/deploy/Dockerfile"),
)


def on_files(files: Files, config: Any) -> Files:
    for pattern in (*PAGES, *LINKED):
        for path in sorted(ROOT.glob(pattern)):
            place = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, place, abs_src_path=str(path)))
    return files
