#!/usr/bin/env python3
"""Makes token files from English documentation of Debian: the manuals of Debian and of the Linux kernel.

The packages are downloaded by apt-get and unpacked, not installed. Their licences (GPL, and free ones of their own) allow
this use; nothing of them is part of this project. Documents are shuffled by a digest of their names, so that the part for
validation, the end of the file, is like the rest.
"""

import argparse
import gzip
import hashlib
import json
import pathlib
import subprocess
import tempfile

PACKAGES = (
    "linux-doc-6.1",
    "debian-reference-en",
    "developers-reference",
    "debian-faq",
    "maint-guide",
    "doc-debian",
)
# A page of a package in another language, and a page twice.
OTHERS = ("/translations/", "/_sources/", "/debian-faq.txt", "/constitution.1.", "/social-contract.1.")
SHORTEST = 400


def download(folder):
    """Unpacks every package into a folder of its own."""
    subprocess.run(["apt-get", "download", "-qq", *PACKAGES], cwd=folder, check=True, stderr=subprocess.DEVNULL)
    for package in sorted(folder.glob("*.deb")):
        target = folder / package.name.split("_")[0]
        subprocess.run(["dpkg-deb", "-x", package, target], check=True)


def documents(folder):
    """The texts by name, in a fixed random order."""
    names = [path for path in folder.rglob("*") if path.is_file() and path.name.removesuffix(".gz").endswith((".rst", ".txt"))]
    found = {}
    for path in names:
        name = str(path.relative_to(folder))
        if not any(other in name for other in OTHERS):
            content = gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes()
            found[name] = content.decode("utf-8", "replace")
    order = sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest())
    return [found[name] for name in order if len(found[name]) >= SHORTEST]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kintsugi", required=True)
    parser.add_argument("--out", required=True, help="the prefix of the token files")
    parser.add_argument("--megabytes", type=float, default=15.0, help="of text, at most")
    parser.add_argument("--vocab", type=int, default=4096)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        download(folder)
        lines, size = [], 0
        for text in documents(folder):
            size += len(text)
            if size > options.megabytes * 1e6:
                break
            lines.append(json.dumps({"text": text}) + "\n")
        corpus = folder / "corpus.jsonl"
        corpus.write_text("".join(lines))
        command = [options.kintsugi, "prepare", corpus, "--out", options.out, "--append-eod", "--overwrite"]
        subprocess.run([*command, "--train-tokenizer", str(options.vocab)], check=True)


if __name__ == "__main__":
    main()
