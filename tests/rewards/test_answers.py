"""Answers as a careful person would score them: a table of probes, hostile texts, and random numbers."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.errors import UserError
from posttrain.rewards import math_judge, numbers
from posttrain.rewards import text as rewards

# (completion, answer, score); None: the answer cannot be scored.
NUMERIC = [
    ("#### 72", "72", 1), ("#### 72.0", "72", 1), ("72", "#### 72.00", 1), ("so 6*7 = 42.", "42", 1),
    ("6*7 = 42", "6", 0), ("3/2", "1/2", 0), ("1/2", "0.5", 1), ("0.50", "1/2", 1), ("\\frac{1}{2}", "0.5", 1),
    ("\\dfrac{3}{4}", "0.75", 1), ("\\frac12", "1/2", 1), ("1 1/2", "1.5", 1), ("-1 1/2", "-1.5", 1), ("½", "0.5", 1),
    ("1½", "1.5", 1), ("2/4", "1/2", 1), ("5,6", "56", 0), ("5,600", "5600", 1), ("1,234,567", "1234567", 1),
    ("12,34", "1234", 0), ("1,2345", "12345", 0), ("#### ,,,5", "5", 0), ("1{,}000", "1000", 1), ("#### 5-3", "5", 0),
    ("#### 5 - 3", "3", 0), ("#### 2", "2", 1), ("#### -$5", "-5", 1), ("#### $-5", "-5", 1), ("#### −5", "-5", 1),
    ("#### \u22125", "-5", 1), ("#### –5", "-5", 1), ("- 5", "-5", 1), ("#### +5", "5", 1), ("#### 1e3", "1000", 1),
    ("1.5e3", "1500", 1), ("1.5E-3", "0.0015", 1), ("1.5×10^3", "1500", 1), ("1.5 \\times 10^{3}", "1500", 1),
    ("2·10³", "2000", 1), ("10^6", "1000000", 1), ("10^{-2}", "0.01", 1), ("1e400", "1", 0),
    ("#### Step 1 gives 7", "7", 1), ("#### Step 1 gives 7", "1", 0), ("#### $5.00", "5", 1),
    ("€1,200.50", "1200.5", 1),
    ("5 dollars", "5", 1), ("5USD", "5", 1), ("£7", "7", 1), ("72 km/h", "72", 1), ("72km/h", "72", 1), ("5m", "5", 1),
    ("5 m^2", "5", 1), ("30°", "30", 1), ("30^\\circ", "30", 1), ("5x", "5", 0), ("x=5", "5", 1), ("x = -5", "-5", 1),
    ("50%", "50", 1), ("50%", "0.5", 1), ("50", "50%", 1), ("0.5", "50%", 1), ("0.5", "50", 0), ("50 %", "0.5", 1),
    ("50 percent", "0.5", 1), ("50\\%", "50", 1), ("\\boxed{42}", "42", 1), ("\\boxed{42} and then 7", "42", 1),
    ("\\boxed{\\frac{3}{4}}", "0.75", 1), ("\\boxed{\\text{about } 7}", "7", 1), ("**42**", "42", 1), ("$42$", "42", 1),
    ("(42)", "42", 1), ("`42`", "42", 1), ("42.", "42", 1), ("42!", "42", 1), ("10:30", "10", 0), ("10:30", "30", 0),
    ("no idea", "42", 0), ("", "42", 0), ("#### ", "42", 0), ("４２", "42", 1), (".5", "0.5", 1), ("0042", "42", 1),
    ("0.1", "0.10000000000000000001", 0), ("100000000000000000001", "100000000000000000000", 0), ("1/0", "1", 0),
    ("42", "none", None), ("42", "", None), ("42", "5,6", None), ("3", "x\n#### 3", 1), ("1,234", "text #### 1,234", 1),
    ("see GPT4: it is 42", "42", 1), ("2 and 3", "3", 1), ("Q3 has 7 items, see Q4", "7", 1),
    (".5", "0.50", 1), ("The answer is .5.", "1/2", 1),
    # sums and other expressions are no number, and do not hide a number behind them
    ("I add 3 + 4 and the result is 7", "7", 1), ("We have 3 × 4 apples, so 12", "12", 1), ("10 - 3 leaves 7.", "7", 1),
    ("3 + 4", "7", 0), ("3 + 4", "4", 0), ("so 3 + 4 = 7", "7", 1), ("5--3", "3", 0), ("3–5", "5", 0), ("5^2", "2", 0),
    ("2024-01-05", "5", 0), ("5/8/2024", "2024", 0), ("1.2.3", "3", 0), ("0x10", "10", 0), ("--5", "5", 0),
    ("\\sqrt{4}", "4", 0), ("\\binom{5}{2}", "2", 0), ("2\\pi", "2", 0), ("5 \\pi", "5", 0), ("\\boxed{10!}", "10", 0),
    ("(1,2)", "2", 0), ("5,6,7", "7", 0), ("1,5×10^3", "1500", 0), ("2*3", "3", 0),
    # separators
    ("1\u202f000", "1000", 1), ("1\\,234", "1234", 1), ("1'000", "1000", 1), ("1_000", "1000", 1), ("1 000", "1000", 1),
    ("12\\,34", "1234", 0), ("1.500.000", "1500000", 0), ("1,\\!234", "1234", 1), ("7 1 000", "1000", 0),
    # markers, boxes, tags
    ("####42", "42", 1), ("text 5\n####\n42", "42", 1), ("#### 72\n\nI used 5 steps", "72", 1),
    ("#### 3\n#### 4", "4", 1),
    ("5 #### no", "5", 0), ("#### \\$5", "5", 1), ("\\boxed{}", "7", 0), ("\\boxed{7", "7", 1), ("\\boxed 7", "7", 1),
    ("\\boxed{1}\\boxed{2}", "2", 1), ("\\(42\\)", "42", 1), ("<answer>42</answer>", "42", 1),
    ("42<|im_end|>", "42", 1),
    ("6*7=<<6*7=42>>42 apples", "42", 1), ("Answer:42", "42", 1), ("“42”", "42", 1), ("**Answer:** 42", "42", 1),
    ("答案是42。", "42", 1), ("I get 42\nWait, so 43", "43", 1), ("#42", "42", 1),
    # signs and dashes
    ("Answer – 42", "42", 1), ("it is - 42", "-42", 1), ("-$ 5", "-5", 1), ("-\\frac{3}{4}", "-0.75", 1),
    ("\\frac{-3}{4}", "-3/4", 1), ("-0", "0", 1), ("≈ 5", "5", 1), ("\\approx 5", "5", 1),
    # units and currencies
    ("42 °C", "42", 1), ("42°F", "42", 1), ("5\\text{ cm}", "5", 1), ("500円", "500", 1), ("US$5", "5", 1),
    ("5€", "5", 1),
    ("USD5", "5", 1), ("Rs.5", "5", 1), ("5 m/s", "5", 1), ("12cm³", "12", 1), ("5 x", "5", 0), ("5k", "5000", 1),
    ("5 million", "5000000", 1), ("5 million", "5", 1), ("5 million", "5%", 0), ("$5M", "5000000", 1),
    # powers of ten
    ("1.5*10**3", "1500", 1), ("1.5×10⁻³", "0.0015", 1), ("\\boxed{3\\times10^{8}}", "300000000", 1), ("1e", "1", 0),
    ("1e-9999", "0", 0), ("1e9999", "10e9998", 1), ("1e999999999", "1", 0),
    ("0.333", "1/3", 0), ("2\\frac{1}{2}", "2.5", 1), ("a/b", "1", 0), ("1/3", "2/6", 1),
]  # fmt: skip
MATH = [
    ("\\frac{1}{2}", "0.5", 1), ("\\boxed{\\frac{3}{4}}", "\\frac{6}{8}", 1), ("\\{2,1\\}", "\\{1,2\\}", 1),
    ("\\{1,3\\}", "\\{1,2\\}", 0), ("(0,1]", "(0,1]", 1), ("[0,1]", "(0,1]", 0), ("(x+1)^2", "x^2+2x+1", 1),
    ("x^2+1", "x^2+2x+1", 0), ("2\\sqrt{2}", "\\sqrt{8}", 1), ("\\sqrt{2}", "\\sqrt{8}", 0),
    ("\\boxed{\\sqrt{9}}", "3", 1), ("The answer is $\\frac{\\pi}{2}$.", "\\frac{\\pi}{2}", 1),
    ("3", "\\frac{\\pi}{2}", 0),
    ("\\boxed{42}", "42", 1), ("41", "42", 0), ("1,234", "1234", 1), ("#### 72", "text\n#### 72", 1),
    ("", "\\sqrt{8}", 0),
    ("x", "", None),
    ("5,6", "56", 0), ("12,34", "1234", 0), ("3/2", "\\frac{1}{2}", 0), ("#### 5-3", "5", 0), ("#### 5-3", "2", 1),
    ("x = 0.3333333", "1/3", 0), ("0.3333333", "\\frac{1}{3}", 0), ("2^{10}", "1024", 1), ("2^{10}", "1025", 0),
    ("So $x=\\frac{\\pi}{2}$.\nI hope this helps!", "\\frac{\\pi}{2}", 1), ("π/2", "\\frac{\\pi}{2}", 1),
    ("Therefore\n\\[\n\\frac{\\pi}{2}\n\\]", "\\frac{\\pi}{2}", 1), ("**Answer:** $\\sqrt{2}$", "\\sqrt{2}", 1),
    ("Final answer: \\sqrt{2}", "$\\sqrt{2}$", 1), ("2√2", "\\sqrt{8}", 1), ("sqrt(2)", "\\sqrt{2}", 1),
    ("x**2+1", "x^2+1", 1), ("y = 2x+1", "2x+1", 1), ("x=3", "3", 1), ("3", "x=3", 1), ("x=4", "x=3", 0),
    ("(1,2)", "(2,1)", 0), ("(2,1)", "(2,1)", 1), ("(0,1) \\cup (2,3)", "(0,1)", 0), ("x>3", "x<3", 0),
    ("3>x", "x<3", 1), ("(-\\infty, 2]", "(-\\infty,2]", 1), ("4i+3", "3+4i", 1), ("3-4i", "3+4i", 0),
    ("2", "\\pm 2", 0), ("\\pm 2", "\\pm 2", 1), ("\\binom{5}{2}", "10", 1), ("\\boxed{10!}", "3628800", 1),
    ("\\log_2 8", "3", 1), ("\\sqrt{x^2}", "x", 0), ("-\\infty", "\\infty", 0), ("\\frac{1}{0}", "1", 0),
    ("\\frac{1}{\\sqrt{2}}", "\\frac{\\sqrt{2}}{2}", 1), ("50\\%", "\\frac{1}{2}", 1), ("Tuesday", "Monday", 0),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}", 1),
    ("\\begin{pmatrix}1\\\\3\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}", 0),
    ("#### \\sqrt{2}", "so\n#### \\sqrt{2}", 1), ("42", "####", None),
]  # fmt: skip


@pytest.mark.parametrize("completion, answer, score", NUMERIC)
def test_numeric(completion, answer, score):
    assert rewards.numeric(completion, answer, True) == score


@pytest.mark.parametrize("completion, answer, score", MATH)
def test_math(completion, answer, score):
    assert rewards.math(completion, answer, True) == score


@pytest.mark.parametrize("completion, answer, score", [probe for probe in NUMERIC if probe[2] == 1])
def test_math_of_plain_numbers_is_numeric_where_numeric_is_right(completion, answer, score):
    """Mathematics may find more answers right than a reader of plain numbers, never fewer."""
    assert rewards.math(completion, answer, True) == score


def test_the_table_is_long_and_every_answer_is_right_by_itself():
    assert len(NUMERIC) + len(MATH) >= 80
    for reward, table in ((rewards.numeric, NUMERIC), (rewards.math, MATH)):
        for _, answer, score in table:
            assert reward(answer, answer, True) == (None if score is None else 1), answer


@pytest.mark.parametrize(
    "last, right", [("#### 5", 1), ("#### ,,,5", 0), ("#### $1,200", 1), ("5", 0), ("#### about", 0), ("#### -0.5%", 1)]
)
def test_the_format_is_a_marker_and_a_number(last, right):
    assert rewards.marked_format(f"thinking 3\n{last}\n", "", True) == right
    assert rewards.marked_format(f"thinking 3\n{last}", "", False) == 0


# Seconds that a new process needs to import sympy on a busy machine.
START = 20
HOSTILE = [
    "9" * 100_000, "(" * 50_000, "{" * 50_000, "\\frac{" * 5_000, "#### " + "1/" * 20_000, "1," * 50_000,
    "-" * 100_000,
    "\\boxed{" * 20_000, "10^10^10", "9**9**9", "$10^{10^{10}}$", "$\\sum_{i=1}^{10^{12}} i!$",
    "1e9999", "\0", "\ud800", "1" + " 1/2" * 30_000, "\\frac{" + " " * 100_000, "^" + " " * 100_000, "- " * 50_000,
    "\\boxed{1}" * 12_000, "####\n" * 20_000, "1 000 " * 20_000, "$\n" * 50_000, "\\[" * 50_000,
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_wrong_and_quick(text):
    began = time.perf_counter()
    assert rewards.numeric(text, "42", True) == 0
    assert rewards.marked_format(text, "", True) == 0
    # As an answer it may hold a number; it must not raise.
    rewards.numeric("42", text, True)
    assert time.perf_counter() - began < 2
    assert rewards.math(text, "\\sqrt{8}", True) == 0
    assert time.perf_counter() - began < 2 + math_judge.SECONDS + START


def test_no_completion_is_right_of_an_answer_that_takes_too_long():
    assert rewards.math("4", "$10^{10^{10}}$", True) == 0


def test_the_judge_is_there_again_after_a_text_that_it_did_not_survive():
    assert rewards.math("$10^{10^{10}}$", "\\sqrt{8}", True) == 0
    assert rewards.math("2\\sqrt{2}", "\\sqrt{8}", True) == 1


def test_in_a_thread():
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(rewards.math("2\\sqrt{2}", "\\sqrt{8}", True))) for _ in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1.0, 1.0]


def test_the_library_is_not_imported_before_it_is_asked():
    code = "import sys, posttrain.tasks as t; t.jsonl; from posttrain.rewards import text as r\n"
    code += "assert r.numeric('1', '1', True) == r.math('1', '1', True) == 1\n"
    code += (
        "assert r.JUDGE._child is None and not any(m.startswith(('math_verify', 'latex2sympy')) for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_process_ends_with_the_run():
    code = "from posttrain.rewards import text as r; r.math('x', 'x+1', True); print(r.JUDGE._child.pid)"
    child = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    until = time.perf_counter() + 20
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.perf_counter() < until
        time.sleep(0.05)


def test_without_the_library_one_line_says_what_to_install(monkeypatch, tmp_path):
    """An interpreter that cannot run the child, as where math-verify is not installed."""
    monkeypatch.setattr(math_judge.sys, "executable", "/bin/false")
    with pytest.raises(UserError, match="pip install math-verify"):
        math_judge.Judge().equal("x", "x")


decimals = st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9)
WRITTEN = [
    "{:f}", "{:,f}", "${:,f}", "{:f} km", "**{:f}**", "\\boxed{{{:f}}}", "so it is {:f}.", "x = {:f}",
    "work 17\n#### {:f}", "{:e}", "({:f})", "${:f}$", "{:+f}", "{:f}0", "3 + 4 is wrong, {:,f} is right",
    "<answer>{:f}</answer>",
]  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(decimals, st.sampled_from(WRITTEN), st.sampled_from(WRITTEN))
def test_a_number_written_in_two_ways_is_the_same(value, one, other):
    assert rewards.numeric(one.format(value), other.format(value), True) == 1


@settings(max_examples=100, deadline=None)
@given(decimals, st.sampled_from(WRITTEN), st.decimals(min_value="0.001", max_value="0.5", places=3))
def test_a_number_beside_it_is_another(value, written, shift):
    assert rewards.numeric(written.format(value + shift), f"{value:f}", True) == 0


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_no_text_raises(text):
    rewards.numeric(text, "1", True)
    rewards.numeric("1", text, True)
    rewards.marked_format(text, "", True)
    assert numbers.plain(text) is None or numbers.final(text) is not None
