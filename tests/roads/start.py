"""A user's own start: a script that builds the command line of a training and runs it as another process."""

import subprocess
import sys

print("training begins", flush=True)
subprocess.run([sys.executable, *sys.argv[1:]], check=True)
print("training has ended", flush=True)
