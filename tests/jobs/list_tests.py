"""Prints "file;class;method" for each test of the files given, for CMake."""

import importlib
import sys
import unittest

for name in sys.argv[1:]:
    module = importlib.import_module(f"test_{name}")
    for suite in unittest.defaultTestLoader.loadTestsFromModule(module):
        for test in suite:
            print(name, *test.id().split(".")[1:], sep=";")
