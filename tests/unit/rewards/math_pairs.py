r"""Answers by hand, right and wrong: (the row's answer, right ones, wrong ones). Each stands in a box, where it does not
begin with `>`: what follows is then the whole response."""

ANSWERS = [
    # whole numbers, signs, separators
    (
        "5",
        ["5", "+5", "5.0", "5.", "\\text{5}", "$5$", "x = 5", "\\frac{10}{2}", "2+3"],
        ["-5", "6", "50", "0.5", "x+5", "\\sqrt{5}", ""],
    ),
    ("-3", ["-3", "\u22123", "- 3", "\\text{-}3", "-\\frac{9}{3}"], ["3", "--3", "-0.3", "|{-3}|"]),
    ("1234", ["1234", "1,234", "1{,}234", "1 234", "1\\,234", "1234.00"], ["1,23", "12345", "1.234", "1;234"]),
    ("0", ["0", "-0", "0.0", "x - x"], ["1", "\\emptyset", "o"]),
    ("1000000", ["10^6", "10^{6}", "1,000,000", "1 \\times 10^6", "1e6"], ["10^5", "1000", "10 \\cdot 6"]),
    # fractions, decimals, mixed numbers, percent
    (
        "\\frac{3}{4}",
        ["3/4", "0.75", "\\dfrac{3}{4}", "\\tfrac34", "\\frac{6}{8}", ".75"],
        ["4/3", "0.7", "-3/4", "3.4", "34"],
    ),
    ("\\frac{1}{3}", ["1/3", "0.333333", "0.\\overline{3}", "\\frac13"], ["0.33", "0.3", "1.3"]),
    ("\\frac{7}{2}", ["3\\frac{1}{2}", "3 1/2", "3.5", "\\frac{-7}{-2}"], ["\\frac{2}{7}", "3\\cdot\\frac12", "31/2"]),
    ("0.1666666", ["1/6", "0.166667"], ["0.16", "1/7"]),
    ("0.\\overline{12}", ["\\frac{4}{33}", "12/99"], ["0.12", "0.21"]),
    ("25\\%", ["25\\%", "25", "0.25", "25%", "\\frac14"], ["2.5\\%", "0.025", "75\\%"]),
    # roots, powers, constants, functions
    (
        "2\\sqrt{2}",
        ["\\sqrt{8}", "2\\sqrt2", "\\sqrt2+\\sqrt2", "\\frac{4}{\\sqrt{2}}", "2^{3/2}"],
        ["\\sqrt{2}", "2.8", "\\sqrt[3]{8}"],
    ),
    (
        "\\frac{\\pi}{2}",
        ["\\pi/2", "\\frac{1}{2}\\pi", "0.5\\pi", "90^\\circ \\cdot \\frac{\\pi}{180^\\circ}"],
        ["\\pi", "\\frac{2}{\\pi}", "\\frac{p}{2}", "1.5"],
    ),
    ("\\ln 2", ["\\ln(2)", "\\log_e 2", "\\frac{\\ln 4}{2}"], ["\\ln 3", "\\log_2 e", "2"]),
    ("e^2", ["e^{2}", "\\exp(2)", "e \\cdot e"], ["e", "2^e", "x^2"]),
    ("\\sin^2 x + \\cos^2 x + 1", ["2"], ["1", "\\sin x"]),
    ("3+4i", ["4i+3", "3 + 4 i"], ["3-4i", "5", "3+4", "7i"]),
    ("\\binom{5}{2}", ["10", "\\frac{5!}{2!3!}"], ["20", "\\binom{5}{4}", "5/2"]),
    ("2^{10}", ["1024", "4^5", "2^{5} \\cdot 32"], ["2048", "20", "2^9"]),
    # expressions
    ("x^2+2x+1", ["(x+1)^2", "1+2x+x^2", "x(x+2)+1"], ["x^2+1", "(y+1)^2", "x^2-2x+1"]),
    ("p - q", ["-q+p", "p-q"], ["q-p", "p+q"]),
    ("\\frac{x}{x+1}", ["1-\\frac{1}{x+1}", "x(x+1)^{-1}"], ["\\frac{x+1}{x}", "\\frac{1}{x+1}"]),
    # equations, assignments, inequalities
    ("x=5", ["5", "x=5", "5 = x"], ["y=6", "x=-5", "x \\ne 5 + 1"]),
    ("y = 2x + 3", ["y=2x+3", "y = 3 + 2x", "y-2x=3", "2x - y + 3 = 0"], ["y=2x-3", "y=3x+2"]),
    ("x \\ge 3", ["x\\geq 3", "3 \\le x"], ["x > 3", "x \\le 3", "3"]),
    # tuples, lists, sets
    ("(1,2)", ["(1, 2)", "\\left(1,2\\right)", "(\\frac{2}{2}, 2)"], ["(2,1)", "(1,2,3)", "(1,3)", "12"]),
    ("\\left(3, \\frac{\\pi}{2}\\right)", ["(3,\\pi/2)", "(3, 0.5\\pi)"], ["(3,\\pi)", "(\\frac{\\pi}{2},3)"]),
    ("1,2,3", ["3,2,1", "1, 2, 3", "\\{1,2,3\\}", "1, 2, \\text{ and } 3"], ["1,2", "1,2,4", "123", "1,2,3,4"]),
    ("\\{1, 2\\}", ["\\{2,1\\}", "\\left\\{1,2\\right\\}", "1,2"], ["\\{1\\}", "\\{1,3\\}"]),
    ("x=\\pm 2", ["\\pm 2", "-2, 2", "x=2 \\text{ or } x=-2"], ["2", "\\pm 3", "-2"]),
    ("(2,12), (3,4)", ["(3,4),(2,12)"], ["(2,12)", "(12,2),(4,3)"]),
    ("\\emptyset", ["\\varnothing", "\\{\\}"], ["0", "\\{0\\}"]),
    # intervals
    ("[1,2)", ["[1, 2)", "\\left[1,2\\right)", "[\\frac22,2)"], ["(1,2)", "[1,2]", "[2,1)", "[1,3)"]),
    ("(-\\infty, 3]", ["(-\\infty,3]", "\\left(-\\infty, 3\\right]"], ["(-\\infty,3)", "(\\infty,3]", "[3,\\infty)"]),
    ("(-\\infty,0)\\cup(1,\\infty)", ["(1,\\infty)\\cup(-\\infty,0)"], ["(0,1)", "(-\\infty,1)\\cup(0,\\infty)"]),
    ("x \\in [-2,7]", ["[-2,7]", "x\\in[-2,7]"], ["(-2,7)", "[-2,8]"]),
    # units, money, angles, matrices, bases, words
    ("5.4 \\text{ cm}", ["5.4", "5.4\\text{cm}", "5.4\\,\\mathrm{cm}", "5.4 cm"], ["54", "5.4^2"]),
    ("\\$18.90", ["18.9", "\\$18.90", "18.90 \\text{ dollars}"], ["18", "1890"]),
    ("90^\\circ", ["90", "90^{\\circ}", "90\\degree"], ["9", "\\frac{\\pi}{3}"]),
    (
        "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
        ["\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}", "\\begin{pmatrix} 1 & 2 \\\\ 3 & 2+2 \\end{pmatrix}"],
        ["\\begin{pmatrix} 1 & 3 \\\\ 2 & 4 \\end{pmatrix}", "1,2,3,4"],
    ),
    ("2516_8", ["2516_{8}", "2516"], ["2516_9", "2615_8"]),
    (
        "\\text{Evelyn}",
        ["\\text{Evelyn}", "Evelyn", "\\textbf{Evelyn}", "\\text{evelyn}"],
        ["\\text{Evan}", "\\text{Angela}"],
    ),
    ("\\text{(B)}", ["B", "\\text{B}", "(B)"], ["A", "\\text{(C)}"]),
    # where the answer stands
    (
        "42",
        [
            ">\\boxed{41}, no: \\boxed{42}",
            ">so\n#### 42",
            ">#### Step 4\nwork\n\n\\boxed{42}",
            ">the answer is 42.",
            ">The final answer is: $42$. I hope it is correct.",
            ">**Answer:** 42",
            ">The answer is 42 because 40 + 2 = 42 and 6 is even.",
            ">The answer is 41? No. Answer: 42",
            ">6 times 7 is 42",
            ">So $x = 42$.",
            "> <think>41</think><answer>42</answer>",
            ">\\[ \\boxed{42} \\]",
            ">$\\boxed{\\dfrac{84}{2}}$",
            ">\\fbox{1} \\boxed{42",
            ">so \\fbox{42}",
            ">so \\boxed {42}",
        ],
        [
            ">",
            ">42, or perhaps 43",
            ">\\boxed{42} or rather \\boxed{43}",
            ">\\boxed{}",
            ">#### 43\n42",
            ">the answer is forty-two",
            ">42 \\boxed{no}",
        ],
    ),
    (
        "\\frac{x}{2}",
        [">Answer: $\\frac{x}{2}$", ">the answer is \\(x/2\\), as was shown", ">Hence $$y = \\frac{x}{2}$$"],
        [">Answer: $\\frac{2}{x}$", ">x and 2"],
    ),
    ("5, 6", [">The answer is $5$ or $6$.", ">the answer is 5 and 6."], [">The answer is $5$ or $7$."]),
    # numbers that nobody can compute out
    (
        "7",
        ["8 - 1"],
        [
            "9^{9^{9^{9}}}",
            "1000000000!",
            "(10^{10^{10}})^2",
            "x^{999999999}",
            "9" * 5000,
            "\\frac{7}{0}",
            "\\int",
            "{" * 500,
        ],
    ),
    ("10^{100}", ["10^{100}", "(10^{50})^2"], ["10^{101}", "10^{10^{100}}"]),
]


def pairs():
    for gold, right, wrong in ANSWERS:
        for answers, value in ((right, 1), (wrong, 0)):
            for answer in answers:
                yield gold, answer[1:] if answer.startswith(">") else f"so \\boxed{{{answer}}}", value
