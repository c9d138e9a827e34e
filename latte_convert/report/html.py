from pathlib import Path
def write_html(report, path: Path) -> None:
    path.write_text("stub replaced by helper")
