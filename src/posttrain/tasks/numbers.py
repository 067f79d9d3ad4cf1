"""Plain numbers in text, exactly: the number that a text ends with, or nothing where it is no plain number.

A plain number is what a person reads as one: a sign, digits with or without thousands separators, a decimal point, an
exponent, one fraction bar; currency, percent and a unit beside it. `5,6`, `5-3`, `10:30` and `5x` are none.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

LONGEST = 10_000  # characters that are looked at, from the end: an answer stands there
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SIGNS = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-") | {"⁄": "/", "∕": "/"})
_LATEX = (
    # A comma in braces separates thousands; these commands are powers, spaces, styles and signs.
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\^\s*\{\s*([-+]?\w+)\s*\}"), r"^\1"),
    (re.compile(r"\\[,!;: ]|\\q?quad|~"), ""),
    (re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox|operatorname)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r" \1/\2 "),
    (re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)"), r" \1/\2 "),
    (re.compile(r"\\(?:left|right|displaystyle)"), ""),
    (re.compile(r"\\(?:times|cdot)"), "×"),
    (re.compile(r"\\([%$])"), r"\1"),
    (re.compile(r"\^\s*\{?\\circ\}?|\^\s*\\circ"), "°"),
)
_POWER = re.compile(r"(?<=\d)\s*[×*·x]\s*10\s*\^\s*\{?\s*([-+]?\d{1,4})\s*\}?")
_CURRENCY = "$€£¥₹₽₩¢"
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)"
    r"(?P<digits>\d{1,3}(?:,\d{3}){1,100}|\d{1,400})?(?P<decimals>\.\d{1,400})?"
    r"(?:[eE](?P<exponent>[-+]?\d{1,4}))?"
    r"(?:/(?P<denominator>\d{1,400}))?"
    r"(?P<percent>\s*%)?"
    # One letter is a unit only if it is one of these; else it is a variable.
    r"(?:°?[A-Za-zµΩ]{2,}(?:/[A-Za-z]+)?(?:\^\d)?|°|[mgshdlLtKCFVWJN](?:/[a-z]+)?(?:\^\d)?)?"
)
_TEN_TO_THE = re.compile(r"10\^\{?([-+]?\d{1,4})\}?")


class Number(NamedTuple):
    value: Fraction
    percent: bool  # 50% may be written as 50 or as 0.5


def equal(one: Number, other: Number) -> bool:
    """The same value, where a percent sign may be left out or carried out."""
    if one.value == other.value:
        return True
    if one.percent == other.percent:
        return False
    percent, bare = (one, other) if one.percent else (other, one)
    return percent.value / 100 == bare.value


def plain(text: str) -> Number | None:
    """The number that the whole text is; None where it is more or something else. Words beside the number are units."""
    return _only(normal(text[-LONGEST:]))


def final(text: str) -> Number | None:
    """The number that a solution ends with.

    It stands after the last `####` (gsm8k's marker), else in the last \\boxed{}, else it is the last one of the text.
    """
    text = text[-LONGEST:]
    if "####" in text:
        line = next((line for line in text.rpartition("####")[2].splitlines() if line.strip()), "")
        return _last(normal(line))
    if (boxed := in_box(text)) is not None:
        return _last(normal(boxed))
    return _last(normal(text))


def in_box(text: str) -> str | None:
    """What the last \\boxed{...} holds, None without one."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    first = text.index("{", start) + 1
    depth = 1
    for place in range(first, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[first:place]
    return text[first:]


def normal(text: str) -> str:
    """The text with one way to write signs, digits, powers and fractions, and without LaTeX's styles and currencies."""
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda found: "^" + found[0].translate(_SUPERSCRIPTS), text)
    # Of a vulgar fraction, ½, it makes 1⁄2: a mixed number keeps its space.
    text = re.sub(r"(?<=\d)(?=[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞])", " ", text)
    text = unicodedata.normalize("NFKC", text.translate(_SIGNS)).translate(_SIGNS)
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    text = re.sub(rf"[{re.escape(_CURRENCY)}]", "", text).replace("**", " ").replace("`", " ")
    text = _POWER.sub(r"e\1", text)
    return re.sub(r"(?<![\w)])-\s+(?=\d*\.?\d)", "-", text)


def _only(text: str) -> Number | None:
    words = _words(text)
    places = [place for place, word in enumerate(words) if re.search(r"\d", word)]
    others = [word for place, word in enumerate(words) if place not in places]
    if (mixed := _mixed([words[place] for place in places])) is not None:
        return mixed
    # Units and names of currencies; a command of LaTeX would change the number.
    if len(places) != 1 or places[0] > 1 or not all(re.fullmatch(r"[^\W\d_]+[./]?|%|°|\W", word) for word in others):
        return None
    return _percent(_word(words[places[0]]), words[places[0] + 1 :])


def _last(text: str) -> Number | None:
    """The last word that begins as a number does; None where it is none, or stands in a sum."""
    if re.search(r"\d\s+[-+*/×÷]\s+\(?-?\d[^=]*$", text):
        return None
    _, _, behind = text.rpartition("=")
    words = _words(behind if re.match(r"\s*[-+]?[\d.]", behind) else text)
    starts = [place for place, word in enumerate(words) if re.match(r"[-+]?[.,]*\d", word)]
    if not starts:
        return None
    place = starts[-1]
    if place and (mixed := _mixed(words[place - 1 : place + 1])) is not None:
        return mixed
    return _percent(_word(words[place]), words[place + 1 :])


def _words(text: str) -> list[str]:
    return [word.strip("()[]<>*_\"'") for word in re.sub("[{}]", " ", text).split()]


def _percent(found: Number | None, behind: list[str]) -> Number | None:
    """A percent sign may stand as the next word."""
    if found is not None and behind and behind[0].strip(".,") in ("%", "percent"):
        return Number(found.value, True)
    return found


def _mixed(words: list[str]) -> Number | None:
    """1 1/2 is one and a half."""
    if (
        len(words) != 2
        or not re.fullmatch(r"[-+]?\d{1,9}", words[0])
        or not re.fullmatch(r"\d{1,9}/\d{1,9}\.?", words[1])
    ):
        return None
    whole, part = _word(words[0]), _word(words[1])
    if whole is None or part is None:
        return None
    return Number(whole.value - part.value if words[0].startswith("-") else whole.value + part.value, False)


def _word(word: str) -> Number | None:
    word = word.strip("()[]*_\"'").rstrip(".,;:!?")
    if found := _TEN_TO_THE.fullmatch(word):
        return Number(Fraction(10) ** int(found[1]), False)
    found = _NUMBER.fullmatch(word)
    if found is None or not (found["digits"] or found["decimals"]) or found["denominator"] in ("0", "00"):
        return None
    value = Fraction(f"{found['sign']}{(found['digits'] or '0').replace(',', '')}{found['decimals'] or ''}")
    value *= Fraction(10) ** int(found["exponent"] or 0)
    denominator = int(found["denominator"] or 1)
    return Number(value / denominator, bool(found["percent"])) if denominator else None
