import sys

from megarlhf.convert.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
