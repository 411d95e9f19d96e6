import sys

import textkit


def main():
    name, text = sys.argv[1:3]
    print(getattr(textkit, name)(text))


if __name__ == "__main__":
    main()
