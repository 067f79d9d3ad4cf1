"""Plain numbers in text, exactly: the number that a text ends with, or nothing where it is no plain number.

A plain number is what a person reads as one: a sign, digits with or without thousands separators, a decimal point, an
exponent, one fraction bar; currency, percent and a unit beside it. `5,6`, `5-3`, `3 + 4`, `10:30` and `5x` are none.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

# Characters that are looked at, from the end, where an answer stands.
LONGEST = 10_000
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_SIGNS = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-") | {"⁄": "/", "∕": "/"})
_CURRENCY = "$€£¥₹₽₩¢"
# Chinese, Japanese and Korean letters, which have no spaces between words.
_CJK = "\u3001-\u30ff\u3400-\u9fff\uac00-\ud7af"
_BEFORE_NFKC = (
    (re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+"), lambda found: "^" + found[0].translate(_SUPERSCRIPTS)),
    # Of the vulgar fraction ½ NFKC makes 1⁄2: a mixed number needs a space before it.
    (re.compile(r"(?<=\d)(?=[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞])"), " "),
    # LaTeX's thin space, and the spaces that do not break, separate thousands if groups of three follow.
    (re.compile(r"\\,"), "\u2009"),
    (re.compile(r"(?<![\d.,])\d{1,3}(?:[\u2009\u202f\xa0'’_]\d{3})+(?!\d)"), lambda found: re.sub(r"\D", "", found[0])),
)
_REWRITTEN = (
    # gsm8k's calculator, then tags and special tokens, which hold no answer.
    (re.compile(r"<<[^<>]{0,200}>>"), ""),
    (re.compile(r"</?[A-Za-z]\w{0,40}>|<\|[^<>|]{1,60}\|>"), " "),
    # LaTeX: a comma in braces separates thousands; spaces, styles, signs, powers and fractions.
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\!"), ""),
    (re.compile(r"\\[;: ()\[\]]|\\q?quad|[~≈≃≅“”«»„]"), " "),
    (
        re.compile(
            r"\\(?:approx|boxed|displaystyle|left|right|(?:black)?square|implies|therefore|[Rr]ightarrow)(?![A-Za-z])"
        ),
        " ",
    ),
    (re.compile(r"\^\s{0,9}\{?\s{0,9}\\circ(?![A-Za-z])\s{0,9}\}?|\\(?:degree|circ)(?![A-Za-z])"), "°"),
    (re.compile(r"\^\s{0,9}\{\s{0,9}([-+]?\w+)\s{0,9}\}"), r"^\1"),
    (re.compile(r"\\(?:text|math|textbf|textit|mathrm|mathbf|mbox|operatorname)\s{0,9}\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\[dt]?frac\s{0,9}\{\s{0,9}([^{}]*?)\s{0,9}\}\s{0,9}\{\s{0,9}([^{}]*?)\s{0,9}\}"), r" \1/\2 "),
    (re.compile(r"\\[dt]?frac\s{0,9}(\d)\s{0,9}(\d)"), r" \1/\2 "),
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])"), "×"),
    (re.compile(r"\\([%$])"), r"\1"),
    # Currency, before or behind the number, with or without the country's letters.
    (re.compile(r"(^|[\s=:({])-\s{0,9}(?=[$€£¥₹₽₩])", re.MULTILINE), r"\1-"),
    (re.compile(rf"\b(?:US|AU?|CA?|NZ|HK|R)\$|[{_CURRENCY}]\s{{0,9}}(?=[-\d.])|[{_CURRENCY}]"), ""),
    (re.compile(r"\b(?:USD|EUR|GBP|CHF|CNY|JPY|INR|Rs\.?|No\.)\s{0,9}(?=[-+]?\d)"), " "),
    (re.compile(r"(?<!#)#(?=\d)|`"), " "),
    # Powers as Python writes them, and then what is bold.
    (re.compile(r"(?<=\d)\*\*(?=[-+]?\d)"), "^"),
    (re.compile(r"\*\*|__"), " "),
    (re.compile(r"(?<=\d)\s{0,9}[×*·x]\s{0,9}10\s{0,9}\^\s{0,9}([-+]?\d{1,4})"), r"e\1"),
    (re.compile(rf"([{_CJK}]+)"), r" \1 "),
    (re.compile(r"(?<=[^\W\d])[:=](?=[-+]?\.?\d)"), r": "),
    # A sign may stand apart from its number, except behind a word, where it is a dash, or a number.
    (re.compile(r"(^|[=:({\[]|\bis)([^\S\n]{0,9})-\s{1,9}(?=\.?\d)", re.MULTILINE), r"\1\2-"),
)
# Each has a value of its own beside the number: 50% is 50 and 0.5, 5 million is 5 and 5000000.
_SCALES = {"%": Fraction(1, 100), "percent": Fraction(1, 100), "k": Fraction(10**3), "thousand": Fraction(10**3)}
_SCALES |= {word: Fraction(10**6) for word in ("m", "million")} | {word: Fraction(10**9) for word in ("b", "billion")}
_SCALES |= {"trillion": Fraction(10**12)}
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)"
    r"(?P<digits>\d{1,3}(?:,\d{3}){1,100}|\d{1,400})?(?P<decimals>\.\d{1,400})?"
    r"(?:[eE](?P<exponent>[-+]?\d{1,4}))?"
    r"(?:/(?P<denominator>\d{1,400}))?"
    # One letter is a unit only if it is one of these; else it is a variable.
    r"(?:(?P<scale>%|[kKMB])"
    r"|[A-Za-zµΩ]{2,}(?:/[A-Za-z]+)?(?:\^\d)?|°[CFK]?|[mgshdlLtCFVWJN](?:/[a-z]+)?(?:\^\d)?)?"
)
_TEN_TO_THE = re.compile(r"10\^([-+]?\d{1,4})")
_GROUPS = re.compile(r"\s*[-+]?\d{1,3}(?: \d{3})+\.?\s*")


class Number(NamedTuple):
    """A value, and the scale that a sign or word behind it gives: 1/100 of percent, 1 of none."""

    value: Fraction
    scale: Fraction


def equal(one: Number, other: Number) -> bool:
    """The same value, where one of the two may leave out its scale or carry it out: 50%, 50 and 0.5."""
    if one.scale != 1 and other.scale != 1:
        return one.value * one.scale == other.value * other.scale
    return one.value == other.value or one.value * one.scale == other.value * other.scale


def plain(text: str) -> Number | None:
    """The number that the whole text is; None where it is more or something else. Words beside the number are units."""
    if len(text) > LONGEST or _factorial(text):
        return None
    return _only(normal(text))


def final(text: str) -> Number | None:
    """The number that a solution ends with.

    It stands after the last `####` (gsm8k's marker), else in the last \\boxed{}, else it is the last one of the text.
    None where the last number is part of a sum, a power, a range, a list without spaces or a time.
    """
    text = text[-LONGEST:]
    if "####" in text:
        line = next((line for line in text.rpartition("####")[2].splitlines() if line.strip()), "")
        return _last(normal(line))
    if (boxed := in_box(text)) is not None:
        return None if _factorial(boxed) else _last(normal(boxed))
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
    for pattern, replacement in _BEFORE_NFKC:
        text = pattern.sub(replacement, text)
    text = unicodedata.normalize("NFKC", text.translate(_SIGNS)).translate(_SIGNS)
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    return text.replace(" ", "") if _GROUPS.fullmatch(text) else text


def _factorial(text: str) -> bool:
    """Where nothing but the answer stands, no sentence ends with an exclamation mark."""
    return re.search(r"\d\s?!", text) is not None


def _only(text: str) -> Number | None:
    words = _words(text)
    places = [place for place, word in enumerate(words) if re.search(r"\d", word)]
    others = [word for place, word in enumerate(words) if place not in places]
    if not others and (mixed := _mixed(words)) is not None:
        return mixed
    # Units and names of currencies; a command of LaTeX, or a sign, would change the number.
    if len(places) != 1 or places[0] > 1 or not all(re.fullmatch(r"[^\W\d_]+[./]?|%|°|", word) for word in others):
        return None
    return _scaled(_word(words[places[0]]), words[places[0] + 1 :])


def _last(text: str) -> Number | None:
    """The last word that begins as a number does; None where it is none, or stands in a sum."""
    words = _words(text.rpartition("=")[2] if re.match(r"\s*[-+]?[\d.]", text.rpartition("=")[2]) else text)
    starts = [place for place, word in enumerate(words) if re.match(r"[-+]?[.,]*\d", word)]
    if not starts:
        return None
    place = starts[-1]
    if place and (mixed := _mixed(words[place - 1 : place + 1])) is not None:
        return mixed
    before, behind = words[max(0, place - 3) : place], words[place + 1 :]
    if before and before[-1] in ("-", "+", "*", "×", "·", "/", "÷", "^", "x") and re.search(r"\d", " ".join(before)):
        return None
    # A command of LaTeX beside the number, or a variable behind it, makes it a part of something else.
    if any("\\" in word for word in [*before[-1:], *behind]) or behind[:1] in (["x"], ["y"], ["z"]):
        return None
    return _scaled(_word(words[place]), behind)


def _words(text: str) -> list[str]:
    """Words without their braces; a command of LaTeX keeps what it is applied to."""
    text = re.sub(r"(\\[A-Za-z]+)\s{0,9}[{\[]\s{0,9}", r"\1_", text)
    found = [word if len(word) == 1 else word.strip("()[]<>*_\"'") for word in re.sub("[{}]", " ", text).split()]
    return [word for word in found if word not in tuple("()[]<>_\"'.,;:!?")]


def _scaled(found: Number | None, behind: list[str]) -> Number | None:
    """A percent sign, or a word such as million, may stand as the next word."""
    word = behind[0].rstrip(".,;:!?)").lower() if behind else ""
    # A single letter apart from its number is a unit: 5 m are metres.
    if found is None or (len(word) == 1 and word != "%"):
        return found
    return Number(found.value, _SCALES.get(word, found.scale))


def _mixed(words: list[str]) -> Number | None:
    """1 1/2 is one and a half."""
    if len(words) != 2 or not re.fullmatch(r"[-+]?\d{1,9}", words[0]):
        return None
    whole, part = _word(words[0]), _word(words[1]) if re.fullmatch(r"\d{1,9}/\d{1,9}\.?", words[1]) else None
    if whole is None or part is None:
        return None
    return Number(whole.value - part.value if words[0].startswith("-") else whole.value + part.value, Fraction(1))


def _word(word: str) -> Number | None:
    word = word.strip("()[]*_\"'").rstrip(".,;:!?)]\"'*")
    if found := _TEN_TO_THE.fullmatch(word):
        return Number(Fraction(10) ** int(found[1]), Fraction(1))
    found = _NUMBER.fullmatch(word)
    if found is None or not (found["digits"] or found["decimals"]):
        return None
    value = Fraction(f"{found['sign']}{(found['digits'] or '0').replace(',', '')}{found['decimals'] or ''}")
    value *= Fraction(10) ** int(found["exponent"] or 0)
    denominator = int(found["denominator"] or 1)
    scale = _SCALES[found["scale"].lower()] if found["scale"] else Fraction(1)
    return Number(value / denominator, scale) if denominator else None
