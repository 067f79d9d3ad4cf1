"""The names in README, CONTRIBUTING and docs/ are there: files, options, switches; so are the imports of a table."""

import ast
import re

import pytest
import yaml
from conftest import ROOT
from omegaconf import OmegaConf
from reading import DOCS, metric_names, metric_pattern, parts, tokens

from posttrain.config import RECIPES
from posttrain.config.validation import every_key

OF_A_RUN = re.compile(  # files that a run writes or reads
    r"(config\.(yaml|json)|job\.json|manifest\.json|metrics\.jsonl|summary\.json|mine\.jsonl|rank<n>\.log)$|^(outputs|checkpoints|model|logs)/"
)
PATH = re.compile(r"(?:[\w.-]+/)+(?:[\w.-]+)?|[\w-]+\.(?:py|md|yaml|json|jsonl|ipynb|txt|toml)")
KEY = re.compile(r"([a-z_]+(?:\.[a-z_]+)*)=(\S+)|([a-z_]+(?:\.[a-z_]+)+)")
KEYS = {recipe: every_key(recipe) for recipe in RECIPES}
PATHS = [
    "/" + str(path.relative_to(ROOT)) + "/" * path.is_dir()
    for folder in ("benchmarks", "conf", "docs", "notebooks", "recipes", "src", "tests", ".")
    for path in ((ROOT / folder).iterdir() if folder == "." else (ROOT / folder).rglob("*"))
]


def there_is(path):
    """`losses.py`, `packed/dispatch.py` and `src/posttrain/losses.py` all name one place of the project."""
    return any(known.removesuffix("/").endswith("/" + path.removesuffix("/")) for known in PATHS)


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.name)
def test_paths_exist(doc):
    metric = metric_pattern(
        [*metric_names(), "sampling/kl", "trained/<name>", "eval/<by>/<value>/reward", "rewards/<name>/<entry>/mean"]
    )
    named = [token for token in tokens(doc) if PATH.fullmatch(token) and not metric.fullmatch(token)]
    assert [path for path in named if not there_is(path) and not OF_A_RUN.search(path)] == []


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.name)
def test_links_lead_somewhere(doc):
    links = re.findall(r"\]\(([^)\s]+)\)", doc.read_text())
    here = [link.partition("#")[0] for link in links if not link.startswith("https://")]
    assert [link for link in here if not (doc.parent / link).exists()] == []


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.name)
def test_options_exist(doc):
    assert [wrong for token in tokens(doc) for word in token.split() if (wrong := unknown(word, doc))] == []


def unknown(word, doc):
    """The option that `word` is meant to be, if there is none of that name, or it does not take the value."""
    if not (found := KEY.fullmatch(word)) or PATH.fullmatch(word) or OF_A_RUN.search(word):
        return None
    key, value = found[1] or found[3], found[2]
    first = key.partition(".")[0]
    if value and "." not in key and (ROOT / "conf" / key).is_dir():
        return None if re.search("[<*]", value) or (ROOT / f"conf/{key}/{value}.yaml").is_file() else word
    if doc.name == "algorithms.md" and isinstance(KEYS["grpo"]["algorithm"].get(first), dict):
        key = f"algorithm.{key}"
    elif first not in KEYS["grpo"] | KEYS["sft"]:
        return None  # of Python, of another program, or hydra's
    return None if any(takes(recipe, key, value) for recipe in RECIPES) else word


def takes(recipe, key, value):
    keys = KEYS[recipe]
    for part in key.split("."):
        if not isinstance(keys, dict) or part not in keys:
            return False
        keys = keys[part]
    if value and not re.search("[<*]|^n$|^$|\\.\\.\\.", value) and not key.startswith("task."):
        OmegaConf.merge(OmegaConf.structured(RECIPES[recipe]), OmegaConf.from_dotlist([f"{key}={value}"]))
    return True


def test_switches_exist():
    """Names with an underscore in the description of the switches are switches, other options, or metrics."""
    text = (ROOT / "docs/algorithms.md").read_text().partition("## The switches")[2].partition("## Metrics")[0]
    names = {name for name in re.findall(r"`([a-z]+_[a-z_]+)`", text)}
    known = KEYS["grpo"]["algorithm"].keys() | KEYS["grpo"].keys() | set(metric_names())
    assert len(names) > 5 and names <= known


def test_the_table_of_algorithms_says_what_each_file_sets():
    text = (ROOT / "docs/algorithms.md").read_text()
    table = {
        re.match(r"\| `(\w+)`", line)[1]: set(re.findall(r"`(\w+)`", line.split(" | ")[5]))
        for line in text.splitlines()
        if re.match(r"\| `\w+` \|", line) and line.count(" | ") == 6
    }
    files = {file.stem: yaml.safe_load(file.read_text()) for file in (ROOT / "conf/algorithm").glob("*.yaml")}
    assert table.keys() == files.keys()
    assert {name: set(values or {}) for name, values in files.items()} == table


def part_of(module, order):
    """The row of a module, given as the names of its folders and its file."""
    inner = "/".join(module[:2])
    return inner if inner in order else module[0]


def test_imports_go_up_the_table_of_architecture():
    """A part imports itself and the rows above its own. A folder in a folder that has a row is a part of its own."""
    table = re.findall(r"^\| (`\w+[/.].*?) \|.*\| (.*?)\|$", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
    rows = [row for row, _ in table]
    order = {name: number for number, row in enumerate(rows) for name in re.findall(r"`([\w/]+?)(?:/|\.py)`", row)}
    said = {number: set(re.findall(r"`([\w/]+?)(?:/|\.py)`", column)) for number, (_, column) in enumerate(table)}
    used: dict[int, set[str]] = {number: set() for number in said}
    source = ROOT / "src/posttrain"
    assert {path.stem for path in source.iterdir() if not path.name.startswith(("__", "py.typed"))} <= order.keys()
    for file in source.rglob("*.py"):
        part = part_of(file.relative_to(source).with_suffix("").parts, order)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "posttrain":
                inner = node.module.split(".")[1:]
                for name in [part_of(inner, order)] if inner else [each.name for each in node.names]:
                    assert name == part or order[name] < order[part], f"{file.relative_to(ROOT)} imports {name}"
                    used[order[part]] |= {name} if order[name] != order[part] else set()
            elif isinstance(node, ast.Import):
                assert not any(each.name.startswith("posttrain") for each in node.names), "from posttrain... import"
    for number, names in list(said.items())[1:]:
        # Rows below import whatever they need: "all above".
        if "all above" not in table[number][1]:
            assert used[number] - {"records", "errors", "preemption", "config"} == names, rows[number]


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.name)
def test_shape_suffixes_are_in_the_table(doc):
    """Of names in code blocks and between backticks."""
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Shape suffixes")[2]
    known = set("".join(re.findall(r"^\| ([A-Z](?:, \w)*) \|", table, re.MULTILINE)).replace(", ", ""))
    named = re.findall(r"\b[a-z_]+_([A-Z][A-Za-z0-9]*)\b", "".join(text for _, text, _ in parts(doc)))
    assert {letter for name in named for letter in re.sub(r"\d", "", name)} <= known
