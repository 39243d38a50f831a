# Makes the environment of a codespace, once: Binder's, with torch for the CPU.
set -eu
cd "$(dirname "$0")/.."
conda env create --yes -f binder/environment.yml
echo "conda activate ddpo-lessons" >> ~/.bashrc
conda run -n ddpo-lessons ddpo-lessons doctor
