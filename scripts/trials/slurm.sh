#!/usr/bin/env bash
# Runs a command on a Slurm cluster of two nodes that is only this machine: slurm.sh FOLDER COMMAND... All of the cluster lies
# in the folder and ends with the command. Needs root, and Debian's slurm-wlm, munge and libpmix-dev, which it installs.
set -euo pipefail
folder=$(realpath -m "$1")
shift
if ! { command -v slurmctld && command -v munged && ls /usr/lib/*/pmix2/lib/libpmix.so; } >/dev/null 2>&1; then
    apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm munge libpmix-dev >/dev/null
fi
stop() {
    for file in "$folder"/*.pid "$folder"/munge/pid; do
        if [ -f "$file" ]; then kill "$(cat "$file")" 2>/dev/null || true; fi
    done
}
trap stop EXIT
rm -rf "$folder"
mkdir -p "$folder"/{state,log,munge}
chmod 755 "$folder"
chmod 700 "$folder/munge"
head -c 1024 /dev/urandom >"$folder/munge/key"
chmod 600 "$folder/munge/key"
munged --force --key-file="$folder/munge/key" --socket="$folder/munge.sock" --pid-file="$folder/munge/pid" \
    --log-file="$folder/munge/log" --seed-file="$folder/munge/seed"
cat >"$folder/slurm.conf" <<CONF
ClusterName=desk
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=26817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.sock
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/%n.spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/%n.pid
SlurmctldLogFile=$folder/log/slurmctld
SlurmdLogFile=$folder/log/%n
TmpFS=$folder/%n.tmp
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=n[1-2] NodeAddr=127.0.0.1 Port=[27001-27002] CPUs=4 Sockets=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=1000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
echo "CgroupPlugin=cgroup/v1" >"$folder/cgroup.conf"
export SLURM_CONF="$folder/slurm.conf"
slurmctld -f "$SLURM_CONF"
for node in n1 n2; do
    mkdir -p "$folder/$node.spool" "$folder/$node.tmp"
    slurmd -f "$SLURM_CONF" -N "$node"
done
for try in $(seq 60); do
    if [ "$(sinfo -h -t idle -o %D 2>/dev/null)" = 2 ]; then break; fi
    if [ "$try" = 60 ]; then echo "the nodes do not come up" >&2; exit 1; fi
    sleep 0.5
done
# Nodes that are one machine: Open MPI's usual transport between processes of one host does not work across them.
export OMPI_MCA_btl=self,tcp OMPI_MCA_pml=ob1 OMPI_MCA_btl_tcp_if_include=lo
"$@"
