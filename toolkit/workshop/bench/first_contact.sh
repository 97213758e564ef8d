#!/usr/bin/env bash
# The first minutes on a GPU: `toolkit/workshop/bench/first_contact.sh [OUT]`, fifteen of them if each part needs all its time.
# Correctness comes before figures.
#
# Each part has a time limit and runs whatever became of those before, except that nothing is measured where the kernels
# are wrong. On a T4, where Triton can't run and 8B fits in four bits alone, it measures what serves there. OUT (default:
# first_contact) gets a log of each part and first_contact.json with what it printed last; a table is printed at the end.
# PLATFORM=cpu tries the script itself where there is no GPU.
set -uo pipefail
cd "$(dirname "$0")/../../.."
out=$(realpath -m "${1:-first_contact}")
platform=${PLATFORM:-cuda}
mkdir -p "$out"
rm -f "$out"/*.log "$out"/*.part
export JAX_PLATFORMS=$platform,cpu PYTHONPATH=$PWD/toolkit:$PWD/kernels:${PYTHONPATH:-} PYTHONUNBUFFERED=1
[ "$platform" != cpu ] || export JAX_PLATFORMS=cpu

part() { # NAME SECONDS COMMAND…: run it, keep its log, note how it ended
  local name=$1 limit=$2 start=$SECONDS rc
  shift 2
  timeout -k 5 "$limit" "$@" >"$out/$name.log" 2>&1
  rc=$?
  echo "$name $rc $((SECONDS - start))" >"$out/$(printf %02d "$((++parts))").part"
  printf '%-12s %s  %s s  %s\n' "$name" "$([ $rc = 0 ] && echo ok || echo "failed ($rc)")" "$((SECONDS - start))" \
    "$(tail -n 1 "$out/$name.log" | cut -c1-90)"
  return $rc
}
parts=0

part device 30 python -c '
import jax, json
d = jax.devices()[0]
assert d.platform == "'"$([ "$platform" = cuda ] && echo gpu || echo "$platform")"'", d
names = "device_kind", "compute_capability", "core_count"
print(json.dumps({"jax": jax.__version__} | {name: str(getattr(d, name, "")) for name in names}))' || exit 1
# The dtype that this GPU multiplies, and whether 8B fits in 16 bits.
read -r dtype fits <<<"$(python -c '
import jax
from rekindle_kernels import gpus
limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
print("bfloat16" if gpus.multiplies_bfloat16() else "float16", int(limit > 20e9))')"
large=(--model 8b --dtype "${dtype:=bfloat16}")
[ "${fits:-1}" = 1 ] || large+=(--quantize int4)
part predicted 30 python toolkit/workshop/bench/predicted_steps.py
part kernels 170 python -m pytest -q -x -p no:benchmark -m gpu tests/kernels --ignore=tests/kernels/test_mosaic_on_gpu.py
right=$?
part sessions 90 python -m pytest -q -m gpu tests/session/test_on_gpu.py
# A first text on a fresh machine, and of a second process that loads what the first one compiled.
part first_text 80 python toolkit/workshop/bench/first_text.py --rounds 1
if [ $right = 0 ]; then
  part attention 70 python -m kernel_workshop.gpu
  part first_06b 80 python -m rekindle bench --model 0.6b --dtype "$dtype" --workloads W5 --repeat 1 --json
  part engine_06b 140 python -m rekindle bench --model 0.6b --dtype "$dtype" --workloads W1,W2,W3 --repeat 1 --json
  part engine_8b 150 python -m rekindle bench "${large[@]}" --workloads W1,W3 --repeat 1 --json
fi
# The prefill that is chosen by its name alone comes last, so that nothing else waits for it.
part mosaic 60 python -m pytest -q -x -m gpu tests/kernels/test_mosaic_on_gpu.py \
  && part mosaic_speed 40 python -m kernel_workshop.gpu --mosaic

JAX_PLATFORMS=cpu python toolkit/workshop/bench/first_contact_report.py "$out"
exit $right
