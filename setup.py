"""The README as the package index shows it: all else is in pyproject.toml.

Its links are relative, so that they work in a checkout and in any fork. The package index has no files for them to lead
to, so a build on GitHub makes them absolute, to the repository and the tag that it builds.
"""

import os
import re
from pathlib import Path

from setuptools import setup


def absolute(readme: str, page: str, raw: str) -> str:
    """The README with its links under the address `page`, and its pictures under `raw`."""
    text = re.sub(r"(!\[[^\]]*\]\(|src=\")(?!https?:)", rf"\g<1>{raw}/", readme)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?!https?:|#)", rf"\g<1>{page}/", text)


def described(readme: str, environment: dict[str, str]) -> dict[str, object]:
    """What setup() is told: the README, and the address of the repository where there is one."""
    kind = {"long_description": readme, "long_description_content_type": "text/markdown"}
    if "GITHUB_REPOSITORY" not in environment:
        return kind
    server = environment.get("GITHUB_SERVER_URL", "https://github.com")
    home, tag = f"{server}/{environment['GITHUB_REPOSITORY']}", environment.get("GITHUB_REF_NAME", "HEAD")
    text = absolute(readme, f"{home}/blob/{tag}", f"{home}/raw/{tag}")
    urls = {"Repository": home, "Issues": f"{home}/issues", "Changelog": f"{home}/blob/{tag}/CHANGELOG.md"}
    return kind | {"long_description": text, "project_urls": urls}


if __name__ == "__main__":
    setup(**described(Path("README.md").read_text(encoding="utf-8"), dict(os.environ)))
