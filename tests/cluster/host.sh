# PID 1 of a host: it makes the host's network and files, and starts sshd. Argument: the host's folder.
set -eu
trap '' HUP
umask 022
cd "$1"
on_switch() { nsenter --net=/proc/self/fd/9 ip "$@"; }
on_switch -force -batch unplug 2>/dev/null || true # what is left of an earlier start
on_switch -batch plug
exec 9<&-
ip -batch address
cat files/etc/hostname >/proc/sys/kernel/hostname

mkdir -p disk/root/{home/alice,mnt,opt,root,srv} disk/{etc,usr,var}/{upper,work}
mount --bind disk/root disk/root
for link in /bin /sbin /lib*; do
  if [ -L "$link" ]; then ln -sfn "$(readlink "$link")" "disk/root$link"; fi
done
mount --all --fstab mounts
cd disk/root
mkdir run/sshd
if [ ! -e ../installed ]; then
  cp -r --remove-destination --no-preserve=mode ../../files/. .
  chmod 600 etc/ssh/hostkey
  cat ../../users >>etc/passwd
  cat ../../groups >>etc/group
  sed -i 's/^root:[^:]*/root:*/' etc/shadow # sshd takes an account with "!" for a locked one
  chown 1717:1717 home/alice
  chmod 711 root # the Python that all users share may be below
  touch ../installed
fi

pivot_root . .
umount -l .
cd /
/usr/sbin/sshd -D -e &
wait $! # meanwhile bash reaps orphans
