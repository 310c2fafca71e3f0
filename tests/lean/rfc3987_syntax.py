"""Found in place of the real one by processes of tests (``tests.frugal.without_grammars``)."""

raise ImportError("it takes two seconds")
