# Runs a command, in a mount namespace of its own, without /proc and /dev/shm, and with a ps(1) all the same.
# Arguments: an empty folder, the command.
set -eu
cd "$1"
shift
mkdir -p dev
mount -t tmpfs -o mode=755 dev dev
for device in null zero full random urandom tty; do
  touch "dev/$device"
  mount --bind "/dev/$device" "dev/$device"
done
touch ps
mount --bind /bin/ps ps # it reads /proc, so it has one of its own
cat >own-ps <<END
#!/bin/sh
exec unshare --mount sh -c 'mount -t proc proc /proc; exec $PWD/ps "\$@"' ps "\$@"
END
chmod +x own-ps
mount --bind own-ps /bin/ps
mount --rbind dev /dev
mount -t tmpfs -o ro,mode=555 proc /proc
cd - >/dev/null
exec "$@"
