"""Names as nobody should give them to a client, a class or a folder."""

import hypothesis.strategies as st

NASTY = (
    *("[/]", "[bold]", "[", "a\\", "\\[x", ":smile:", "$x^$", "$", "\\$", "_a", "^", "a b", " ", "", "..", "a/b"),
    *(
        "a\u2028b",
        "a\x0bb",
        "a\x85b",
        "a\rb",
        "a\nb",
        "a\tb",
        "\x1b[31m",
        "\x1b]0;x\x07",
        "\u202eabc",
        "\x00",
        "\ud800",
    ),
    *(
        "\udcff",
        "=1+1",
        "+1",
        "-1",
        "@x",
        "'=1",
        "|",
        "a,b",
        '"',
        '"a\n',
        "`",
        "<b>",
        "&",
        "%s",
        "{}",
        "名前",
        "é" * 300,
    ),
)
# every category, surrogates too, which are in names of files that are not UTF-8
names = st.one_of(st.sampled_from(NASTY), st.text(st.characters(exclude_categories=())))
