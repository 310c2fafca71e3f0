# PID 1 of a bed: it has the switch that joins the hosts, and starts them. When it ends, everything of the bed ends.
# Arguments: the bed's folder, the scripts' folder, a Python, an open descriptor of the caller's network.
set -eu
trap '' HUP
scripts=$2 python=$3
cd "$1"
nsenter --net="/proc/self/fd/$4" ip -batch plug
ip -batch switch
nft -f firewall
exec 9</proc/self/ns/net # hosts plug their cables into this network

boot() { # a host; its disk outlives it
  if ! mountpoint -q "$1/disk"; then mount -t tmpfs -o mode=755 "$1" "$1/disk"; fi
  exec unshare --net --uts --ipc --mount --pid --fork --kill-child bash "$scripts/host.sh" "$1" \
    </dev/null >"$1/console.log" 2>&1 8>&-
}

delay() { # two interfaces, milliseconds
  exec "$python" -IS "$scripts/relay.py" "$@" </dev/null >"$1.log" 2>&1 8>&- 9>&-
}

if [ -e stays ]; then exec 8<>orders; fi # without it, the bed ends with the process that writes its orders
while read -ra order; do "${order[@]}" & done <orders
