import unittest

import textkit


class Textkit(unittest.TestCase):
    pass
