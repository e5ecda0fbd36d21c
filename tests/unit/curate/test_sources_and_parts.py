"""Listing, budgets, held-out packages, parts and the tokenizer's sample."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from k3ray.curate.parts import make_parts, select_files, split_of
from k3ray.curate.pydoc_texts import pydoc_names, pydoc_text
from k3ray.curate.sample import Candidate, choose_sample
from k3ray.curate.sources import SourceFile, list_sources
from k3ray.errors import DataError

EXTENSIONS = (".py", ".md")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in (
        "alpha/a.py", "alpha/sub/b.md", "alpha/c.bin", "Beta-Pkg/d.py", "top.py",
        "alpha/tests/skipped.py", "pip/_vendor/skipped.py", "x.dist-info/skipped.md",
        "alpha/__pycache__/skipped.py",
    ):  # fmt: skip
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "root"


def test_folder_gives_documents_and_packages(tree: Path) -> None:
    files = list_sources([str(tree)], EXTENSIONS).files
    assert [(file.document, file.package) for file in files] == [
        ("root/Beta-Pkg/d.py", "beta_pkg"),
        ("root/alpha/a.py", "alpha"),
        ("root/alpha/sub/b.md", "alpha"),
        ("root/top.py", "top"),
    ]
    assert files[1].size_bytes == len("alpha/a.py")


def test_globs_and_single_files(tree: Path) -> None:
    globbed = list_sources([f"{tree}/*/[ad].py"], EXTENSIONS).files
    assert [file.document for file in globbed] == ["root/Beta-Pkg/d.py", "root/alpha/a.py"]
    single = list_sources([str(tree / "top.py")], EXTENSIONS).files
    assert [file.document for file in single] == ["root/top.py"]


def test_sources_of_the_same_name_stay_apart(tree: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "root"
    other.mkdir(parents=True)
    (other / "top.py").write_text("x")
    documents = [file.document for file in list_sources([str(tree), str(other)], EXTENSIONS).files]
    assert "root/top.py" in documents
    assert "root-1/top.py" in documents


@pytest.mark.parametrize("source", ["nothing/*.py", "missing_folder", "root/alpha/*.rst"])
def test_a_source_that_matches_nothing_is_named(
    tree: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tree.parent)
    with pytest.raises(DataError, match="matches no readable file") as caught:
        list_sources(["root", source], EXTENSIONS)
    assert caught.value.fields["source"] == source


def test_dangling_links_are_listed_and_left_to_the_reader(tree: Path) -> None:
    (tree / "gone.py").symlink_to(tree / "nowhere.py")
    (tree / "loop").symlink_to(tree)
    documents = [file.document for file in list_sources([str(tree)], EXTENSIONS).files]
    assert "root/gone.py" in documents
    assert not any("loop" in document for document in documents)


def test_pydoc_texts_exist_without_addresses() -> None:
    names = pydoc_names()
    assert "topic/assert" in names
    assert "module/builtins" in names
    assert " at 0x" not in pydoc_text("module/builtins")
    with pytest.raises(FileNotFoundError):
        pydoc_text("module/os")


def files_of(sizes: dict[str, list[int]]) -> list[SourceFile]:
    return [
        SourceFile(document=f"{package}/{index}", path="", package=package, size_bytes=size)
        for package, members in sizes.items()
        for index, size in enumerate(members)
    ]


def test_small_packages_come_whole_and_large_ones_share_the_rest() -> None:
    files = files_of({"large": [10] * 100, "middle": [10] * 20, "small": [5]})
    chosen = select_files(files, seed=0, max_total_bytes=205)
    taken = dict.fromkeys(("large", "middle", "small"), 0)
    for file in chosen:
        taken[file.package] += file.size_bytes
    assert taken == {"large": 100, "middle": 100, "small": 5}


def test_selection_does_not_depend_on_the_order_of_listing() -> None:
    files = files_of({f"p{index}": [7] * 9 for index in range(20)})
    shuffled = random.Random(0).sample(files, len(files))
    chosen = select_files(files, seed=1, max_total_bytes=500)
    assert chosen == select_files(shuffled, seed=1, max_total_bytes=500)
    assert chosen != select_files(files, seed=2, max_total_bytes=500)
    assert sum(file.size_bytes for file in chosen) <= 500


def test_no_package_is_in_both_sets() -> None:
    files = files_of({f"p{index}": [50] * 5 for index in range(200)})
    parts = make_parts(files, seed=0, heldout_fraction=0.1, part_bytes=300)
    packages: dict[str, set[str]] = {"train": set(), "heldout": set()}
    for part in parts:
        packages[part.split] |= {file.package for file in part.files}
        assert sum(file.size_bytes for file in part.files) <= 300
    assert not packages["train"] & packages["heldout"]
    assert 5 <= len(packages["heldout"]) <= 40
    assert [part.index for part in parts] == list(range(len(parts)))
    assert sorted(f.document for p in parts for f in p.files) == sorted(f.document for f in files)


def test_split_is_a_function_of_the_name() -> None:
    assert split_of("any", seed=0, heldout_fraction=0.0) == "train"
    drawn = [split_of(f"p{index}", seed=0, heldout_fraction=0.05) for index in range(4000)]
    assert 0.03 < drawn.count("heldout") / len(drawn) < 0.07


def test_a_file_larger_than_a_part_gets_its_own() -> None:
    parts = make_parts(files_of({"p": [10, 999, 10]}), seed=0, heldout_fraction=0.0, part_bytes=100)
    assert [len(part.files) for part in parts] == [1, 1, 1]


def test_sample_takes_turns_between_packages() -> None:
    candidates = [
        Candidate(document=f"{package}/{index}", package=package, part=0, text_bytes=10)
        for package, number in (("large", 50), ("small", 2))
        for index in range(number)
    ]
    sample = choose_sample(candidates, seed=0, max_bytes=60)
    assert [item.package for item in sample].count("small") == 2
    assert sum(item.text_bytes for item in sample) == 60
    assert sample == choose_sample(reversed(candidates), seed=0, max_bytes=60)
    assert len(choose_sample(candidates, seed=0, max_bytes=1)) == 1
    assert choose_sample([], seed=0, max_bytes=100) == []
