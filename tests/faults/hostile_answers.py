"""Answers that a policy could learn to give to stall its grader: numbers, towers, degrees, nests, lengths."""

HUGE = ("99999", "999999", "9999999", "99999999", "999999999999", "9" * 60)


def boxed(text):
    """As a completion would give it."""
    return rf"\boxed{{{text}}}"


def powers():
    """Numbers that would fill the memory."""
    for n in HUGE:
        yield from (rf"9^{{{n}}}", rf"9^{n}", rf"9**{n}", rf"{{9}}^{{{n}}}", rf"9^{{-{n}}}", rf"9.5^{{{n}}}")
        yield from (
            rf"\left(\frac{{9}}{{7}}\right)^{{{n}}}",
            rf"\sqrt{{9^{{{n}}}}}",
            rf"9^{{{n}}}-9^{{{n}}}+5",
            rf"1.5 \times 10^{{{n}}}",
        )
        yield from (
            rf"\frac{{1}}{{9^{{{n}}}}}",
            rf"9^{{{n}/7}}",
            rf"\sin(9^{{{n}}})",
            rf"\log_{{3}}(9^{{{n}}})",
            rf"(2+3i)^{{{n}}}",
        )
        yield from (
            rf"5 \mod 9^{{{n}}}",
            rf"\lfloor 9.5^{{{n}}} \rfloor",
            rf"x=9^{{{n}}}",
            rf"\{{1, 9^{{{n}}}\}}",
            rf"(0, 9^{{{n}}})",
        )


def towers():
    """Exponents of exponents, and products in exponents."""
    for a, b in (("9", "9"), ("99", "9"), ("7", "77"), ("2", "99"), ("3", "999")):
        yield from (
            rf"{a}^{{{b}^{{9}}}}",
            rf"{a}^{b}^9",
            rf"{a}**{b}**9",
            rf"({a}^{{{b}}})^{{99999}}",
            rf"(({a}^{b})^{{9999}})^{{9999}}",
        )
        yield from (
            rf"{a}^{{99999 \cdot {b}}}",
            rf"{a}^{{({b}99)({b}9999)}}",
            rf"{a}^{{\frac{{{b}99999}}{{1}}}}",
            rf"{a}^{{\sqrt{{{b}^{{20}}}}}}",
        )
        yield from (
            rf"{a}^{{{b}!}}",
            rf"({a}!)^{{{b}999}}",
            rf"e^{{{a}^{{{b}}}^9}}",
            rf"{a}^{{{b}x^{{99}}}}",
            rf"2^{{2^{{2^{{2^{{{b}}}}}}}}}",
        )
    yield "99" + "^9" * 60
    yield r"2" + r"\cdot 9^{9999}" * 30
    yield "(" * 6 + "9" + "^9)" * 6
    yield "(" * 15 + "9" + "^2)" * 15 + "^9999"


def roots():
    """Numbers that sympy would factor."""
    for degree, power in ((3, 10000), (997, 10000), (97, 9000)):
        yield rf"\sqrt[{degree}]{{3^{{{power}}}+2}}"


def counted():
    """Factorials, binomials, sums and products that count far."""
    for n in ("1001", "99999", "9999999", "999999999999"):
        yield from (
            rf"{n}!",
            rf"({n})!",
            rf"\left({n}\right)!",
            rf"{{{n}}}!",
            rf"({n}-1)!",
            rf"{n}!!",
            rf"\frac{{{n}!}}{{5!}}",
            rf"x^{{{n}!}}",
        )
        yield from (
            rf"\binom{{{n}}}{{{n[:-1]}}}",
            rf"{{{n} \choose {n[:-1]}}}",
            rf"\sum_{{k=1}}^{{{n}}} k^k",
            rf"\prod_{{k=1}}^{{{n}}} k",
        )
        yield from (rf"\gcd({n}!, 7)", rf"\Gamma({n}{n})", rf"\binom{{{n}x}}{{{n[:-1]}}}")
    yield from (
        "((10!)!)!",
        "10!!!!!",
        "3!!!!",
        r"\lim_{x \to 0} x^{x^x}",
        r"\int_0^1 e^{-x^x} \sin(x^{17}) dx",
        r"\oint x^{99} dx",
        r"\underbrace{9}_{9^9}",
    )


def polynomials():
    """What algebra multiplies out, factors or solves."""
    for n in ("51", "999", "99999", "99999999"):
        yield from (
            rf"(x+y+z)^{{{n}}}",
            rf"(x+1)^{n}",
            rf"(x^2+x+1)^{{{n}}}=0",
            rf"x^{{{n}}}+3x^5+x+1=0",
            rf"\frac{{x^{{{n}}}-1}}{{x-1}}",
        )
        yield from (
            rf"(1+\sqrt{{2}})^{{{n}}}",
            rf"x^{{{n}}} > y^{{{n}}}",
            rf"\{{x^{{{n}}}, y^{{{n}}}\}}",
            rf"\sqrt[{n}]{{x+\sqrt{{y}}}}",
            rf"(\sin x + \cos y)^{{{n}}}",
        )
        yield from (
            rf"[x+y]^{{{n}}}",
            rf"{{x+y}}^{{{n}}}",
            rf"\begin{{pmatrix}}1&2\\3&4\end{{pmatrix}}^{{{n}}}",
            rf"\left(x+\frac{{1}}{{x}}\right)^{{{n}}}",
        )
    many = "abcdefghjklmnopqrstuvwxyz"
    yield "(" + "+".join(many) + ")^{40}"
    yield "".join(f"({letter}+1)^{{2}}" for letter in many)
    yield "".join(f"({letter}+{k})" for k, letter in enumerate(many * 2))
    yield "+".join(rf"\sqrt{{{k}}}" for k in range(2, 60))
    yield r"\frac{1}{" + "+".join(rf"\sqrt{{{k}}}" for k in range(2, 40)) + "}"
    yield "+".join(rf"\sin({k}x)" for k in range(1, 50))
    yield "*".join(rf"\cos({k}x)" for k in range(1, 40))
    yield "x^{17}+3x^5+x+1=0"
    yield "x^{19}+y^7+3xy+x=0"
    yield r"\sin(x)+x^{13}=e^{x}+y"
    yield r"\tan(\tan(\tan(\tan(\tan(\tan(\tan(x)))))))=7"
    yield r"|" * 30 + "x" + r"|" * 30
    yield (
        r"\begin{pmatrix}"
        + r"\\".join("&".join(f"a_{{{i}{j}}}" for j in range(6)) for i in range(6))
        + r"\end{pmatrix}"
    )


def nests():
    """Depth and length, which parsers pay for."""
    for n in (15, 25, 60, 200):
        yield from (
            "{" * n + "5" + "}" * n,
            "(" * n + "5" + ")" * n,
            "[" * n + "5" + "]" * n,
            r"\{" * n + "5" + r"\}" * n,
        )
        yield from (
            r"\frac{" * n + "1" + "}{2}" * n,
            r"\sqrt{" * n + "2" + "}" * n,
            r"\sin(" * n + "x" + ")" * n,
            "-" * n + "5",
            "x^{" * n + "2" + "}" * n,
        )
        yield from (
            r"\frac{1}{1+" * n + "x" + "}" * n,
            r"\left(" * n + "5" + r"\right)" * n,
            r"\sqrt" * n + "2",
            r"|" * n + "5" + "|" * n,
        )
    for n in (400, 3000, 100_000):
        yield from (
            "9" * n,
            "1+" * (n // 2) + "1",
            "x" * n,
            "(x+1)" * (n // 5),
            "1," * (n // 2) + "1",
            r"\pi" * (n // 3),
            "9." + "9" * n,
            "1/" * (n // 2) + "3",
        )


def everything():
    """All of them, each once, as completions."""
    found = [boxed(text) for kind in (powers, towers, roots, counted, polynomials, nests) for text in kind()]
    return list(dict.fromkeys(found))
