"""`python -m server_patches`: start a target server with the plugin. See `server_patches.launch`."""

import sys

from server_patches.launch import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
