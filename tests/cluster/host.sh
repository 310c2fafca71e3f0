# PID 1 of a host: it makes the host's network and files, and starts sshd. Argument: the host's folder.
set -eu
trap '' HUP
cd "$1"
on_switch() { nsenter --net=/proc/self/fd/9 ip "$@"; }
on_switch -force -batch unplug 2>/dev/null || true # what is left of an earlier start
on_switch -batch plug
exec 9<&-
ip -batch address
cat files/etc/hostname >/proc/sys/kernel/hostname

mkdir -p disk
mount -t tmpfs -o mode=755 host disk
mkdir -p disk/root disk/{etc,usr,var}/{upper,work}
mount --bind disk/root disk/root
for link in /bin /sbin /lib*; do
  if [ -L "$link" ]; then cp -P "$link" disk/root/; fi
done
mount --all --fstab mounts
cd disk/root
cp -r --remove-destination ../../files/. .
cat ../../users >>etc/passwd
cat ../../groups >>etc/group
sed -i 's/^root:[^:]*/root:*/' etc/shadow # sshd takes an account with "!" for a locked one
mkdir -p run/sshd home/alice
chown 1717:1717 home/alice
chmod 711 root # the Python that all users share may be below

pivot_root . .
umount -l .
cd /
/usr/sbin/sshd -D -e &
wait $! # meanwhile bash reaps orphans
