#!/usr/bin/env bash
# A private, throw-away Slurm cluster of N "nodes" on one machine, without systemd.
#
#   cluster.sh hold [NODES]   up, print "ready", and down at the end of standard input or on TERM, INT or HUP:
#                             for a test session, whose end, however it comes, closes the pipe
#   cluster.sh up [NODES]     start munged, slurmctld and NODES slurmd (default 2); down if that fails
#   cluster.sh status         sinfo, squeue and the daemons' PIDs (exit 1 when not up)
#   cluster.sh env            print `export SLURM_CONF=...`; eval it to get sbatch/srun/...
#   cluster.sh run CMD...     run CMD with that environment
#   cluster.sh node NODE CMD  run CMD inside a node's namespaces (netns mode)
#   cluster.sh wait JOB [S]   wait until JOB has ended (default 300 s); 0 if it COMPLETED.
#                             (`sbatch --wait` looks after 2, 10, 42, 74, ... s only)
#   cluster.sh kill NODE      SIGKILL one node's slurmd and everything on it ("power loss")
#   cluster.sh start NODE     start that node's slurmd again
#   cluster.sh logs           tail of the daemons' logs
#   cluster.sh down           cancel the jobs, end exactly the processes `up` started
#
# Needs Debian's slurmctld, slurmd, slurm-client and munge. Node names do not resolve in host mode, and CPUs, memory
# and GPUs are claimed, not checked.
#
# Environment (read by `up` and `hold`):
#   SLURM_TEST_DIR    private directory                    [/tmp/slurm-test-$UID]
#   SLURM_TEST_MODE   netns | host | auto                  [host; auto: netns when root may]
#       netns: a network, host-name and mount namespace per node: own address, own
#              `hostname`, own /etc/hosts in which every node name resolves. As on a cluster.
#              slurmctld has such a namespace too, with the bridge in it; the host reaches
#              all of them over one veth, slurmtest0.
#       host:  all slurmd in the host's namespaces, on 127.0.0.1 with a port each: node names
#              do NOT resolve and every node has the same `hostname`. Needs no root.
#   SLURM_TEST_CPUS   CPUs a node claims (fiction)         [64]
#   SLURM_TEST_GPUS   gpu GRES a node claims (fiction)     [8]
#   SLURM_TEST_GPU    their type, also a node feature      [h100]
#   SLURM_TEST_MEM    MiB a node claims (fiction)          [1000000]
#   SLURM_TEST_NET    first three octets of the netns net  [198.18.47]
#   SLURM_TEST_PORT   slurmctld's port; the next ones go to the slurmd in host mode [16817]
set -euo pipefail

DIR=${SLURM_TEST_DIR:-/tmp/slurm-test-$(id -u)}
NET=${SLURM_TEST_NET:-198.18.47}
PORT=${SLURM_TEST_PORT:-16817}
LINK=slurmtest0           # the host's own link into the netns network
CONF=$DIR/etc/slurm.conf
PIDS=$DIR/pids            # one line a daemon: name pid starttime

say() { printf 'cluster: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# --- processes ---------------------------------------------------------------------------
# A PID alone may be recycled; PID and start time (field 22 of stat) together are not.
starttime() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }
alive() { [ -n "$2" ] && [ "$(starttime "$1")" = "$2" ]; }
remember() { printf '%s %s %s\n' "$1" "$2" "$(starttime "$2")" >>"$PIDS"; }
pid_of() { awk -v n="$1" '$1 == n {print $2, $3}' "$PIDS" | tail -1; }
forget() { sed -i "/^$1 /d" "$PIDS"; }

# stop NAME PID STARTTIME: TERM, ten seconds, KILL
stop() {
  alive "$2" "$3" || return 0
  kill -TERM "$2" 2>/dev/null || true
  for _ in $(seq 100); do alive "$2" "$3" || return 0; sleep 0.1; done
  say "$1 ($2) ignored TERM: KILL"
  kill -KILL "$2" 2>/dev/null || true
}

# The PIDs of this cluster's job processes and their slurmstepd, told by the environment
# that slurmd and slurmstepd gave them. $1: of that node only.
leftovers() {
  local p env up
  for p in /proc/[0-9]*; do
    { env=$(tr '\0' '\n' <"$p/environ") || continue; } 2>/dev/null
    grep -qxF "SLURM_CONF=$CONF" <<<"$env" || continue
    if [ "$(cat "$p/comm" 2>/dev/null)" = slurmstepd ]; then
      [ -n "${1:-}" ] || echo "${p#/proc/}"
    elif grep -q "^SLURMD_NODENAME=${1:-.*}\$" <<<"$env"; then
      echo "${p#/proc/}"
      up=$(awk '/^PPid:/ {print $2}' "$p/status" 2>/dev/null)
      [ "$(cat "/proc/${up:-0}/comm" 2>/dev/null)" != slurmstepd ] || echo "$up"
    fi
  done | sort -un
}

# --- configuration -----------------------------------------------------------------------
node_addr() { if [ "$MODE" = netns ]; then echo "$NET.$((10 + $1))"; else echo "$HOSTADDR"; fi; }
node_port() { if [ "$MODE" = netns ]; then echo 6818; else echo $((PORT + $1)); fi; }

configure() {
  local n=$1 ctl ctlname comm='' i user
  user=$(id -un)
  if [ "$MODE" = netns ]; then ctl=$NET.1 ctlname=ctl
  else
    # slurmd can listen on one address only: the one the host's own name resolves to
    HOSTADDR=$(getent ahostsv4 "$(hostname -s)" | awk 'NR == 1 {print $1}')
    case $HOSTADDR in
      127.*) comm=CommunicationParameters=NoInAddrAny,NoCtldInAddrAny ;;
      *) say "$(hostname -s) is not a loopback name: the daemons will listen on all addresses"
         HOSTADDR=127.0.0.1 ;;
    esac
    ctl=$HOSTADDR ctlname=$(hostname -s)
  fi
  mkdir -p "$DIR"/{etc,log,run,state,spool,munge,gpu,tmp}
  chmod 755 "$DIR" "$DIR"/{etc,run,munge}
  chmod 700 "$DIR/state"
  ( umask 077; [ -s "$DIR/etc/munge.key" ] || head -c 1024 /dev/urandom >"$DIR/etc/munge.key" )
  # a gpu's File= must be a device, but any will do; its number becomes CUDA_VISIBLE_DEVICES
  for ((i = 0; i < GPUS; i++)); do ln -s /dev/null "$DIR/gpu/gpu$i"; done

  cat >"$CONF" <<EOF
ClusterName=slurmtest
SlurmctldHost=$ctlname($ctl)
SlurmctldPort=$PORT
SlurmdPort=6818
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
# cred_expire is also how long a requeued job waits before it may start again (120 s by default);
# too short, and a slow machine says "Job credential expired"
AuthInfo=socket=$DIR/munge/munge.socket.2,cred_expire=10
CredType=cred/munge
$comm

StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
# one a node, or the nodes' PMIx servers fall over each other in /tmp (srun --mpi=pmix)
TmpFS=$DIR/tmp/%n
SlurmctldPidFile=$DIR/run/slurmctld.pid
SlurmdPidFile=$DIR/run/slurmd.%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd.%n.log
SlurmctldDebug=info
SlurmdDebug=info

# nothing that needs cgroups
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
# there is no sacct: ended jobs, with their states, are lines of this file
JobCompType=jobcomp/filetxt
JobCompLoc=$DIR/log/jobcomp.log
MpiDefault=none

SchedulerType=sched/backfill
SchedulerParameters=bf_interval=5,sched_interval=5,sched_min_interval=0,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
# believe the node lines below, not the machine
SlurmdParameters=config_overrides

ReturnToService=2
JobRequeue=1
KillOnBadExit=0
KillWait=5
SlurmctldTimeout=10
SlurmdTimeout=10
MessageTimeout=10
UnkillableStepTimeout=30
MinJobAge=600
InactiveLimit=0

EOF
  for ((i = 1; i <= n; i++)); do
    printf '%s ' "NodeName=node$i NodeAddr=$(node_addr "$i") Port=$(node_port "$i")" \
      "NodeHostname=$(if [ "$MODE" = netns ]; then echo "node$i"; else hostname -s; fi)" \
      "CPUs=$CPUS Sockets=2 CoresPerSocket=$((CPUS / 2)) ThreadsPerCore=1 RealMemory=$MEM" \
      "Gres=gpu:$GPU:$GPUS Feature=$GPU State=UNKNOWN" >>"$CONF"
    echo >>"$CONF"
  done
  cat >>"$CONF" <<EOF
PartitionName=batch Nodes=ALL Default=YES DefaultTime=10 MaxTime=INFINITE State=UP
PartitionName=debug Nodes=ALL DefaultTime=5 MaxTime=30 State=UP
EOF
  if [ "$GPUS" = 1 ]; then echo "Name=gpu Type=$GPU File=$DIR/gpu/gpu0"
  else echo "Name=gpu Type=$GPU File=$DIR/gpu/gpu[0-$((GPUS - 1))]"; fi >"$DIR/etc/gres.conf"
  printf 'CgroupAutomount=no\nConstrainCores=no\nConstrainDevices=no\nConstrainRAMSpace=no\n' >"$DIR/etc/cgroup.conf"
  { echo "127.0.0.1 localhost"; echo "$ctl $ctlname"
    for ((i = 1; i <= n; i++)); do echo "$(node_addr "$i") node$i"; done; } >"$DIR/etc/hosts"
  printf 'MODE=%s\nNODES=%s\n' "$MODE" "$n" >"$DIR/etc/cluster.env"
}

# --- daemons -----------------------------------------------------------------------------
# daemon NAME CMD...: in the background, in a session of its own, remembered
daemon() {
  local name=$1; shift
  setsid "$@" </dev/null >>"$DIR/log/$name.out" 2>&1 &
  remember "$name" $!
}

# in_netns NAME ADDR CMD...: CMD in namespaces of its own, once it has a link named eth0.
# setsid, unshare and bash exec, so the PID remembered becomes CMD's own.
in_netns() {
  local name=$1 addr=$2 pid; shift 2
  # shellcheck disable=SC2016
  daemon "$name" unshare --net --uts --mount bash -c '
    set -e
    hostname "$1"; mount --bind "$2" /etc/hosts; addr=$3; shift 3
    mount -t tmpfs -o mode=1777 shm /dev/shm   # shared memory is the node'"'"'s own
    ip link set lo up
    until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done
    ip addr add "$addr/24" dev eth0; ip link set eth0 up
    exec "$@"' _ "$name" "$DIR/etc/hosts" "$addr" "$@"
  pid=$!
  for _ in $(seq 100); do
    [ "$(readlink "/proc/$pid/ns/net")" != "$(readlink /proc/self/ns/net)" ] && break; sleep 0.02
  done
}

start_ctl() {
  local ctld; ctld=$(PATH=$PATH:/usr/sbin command -v slurmctld)
  if [ "$MODE" = host ]; then daemon slurmctld "$ctld" -D -c -f "$CONF"; return; fi
  ip link del $LINK 2>/dev/null || true
  in_netns ctl "$NET.1" "$ctld" -D -c -f "$CONF"
  # eth0 of this one is the bridge itself
  local ctl; ctl=$(pid_of ctl); ctl=${ctl% *}
  nsenter -t "$ctl" -n ip link add eth0 type bridge
  ip link add $LINK type veth peer name host netns "$ctl"
  nsenter -t "$ctl" -n ip link set host master eth0 up
  ip addr add "$NET.254/24" dev $LINK
  ip link set $LINK up
}

start_node() {
  local name=node$1 pid ctl
  mkdir -p "$DIR/spool/$name" "$DIR/tmp/$name"
  chmod 1777 "$DIR/tmp/$name"
  if [ "$MODE" = host ]; then daemon "$name" "$SLURMD" -D -f "$CONF" -N "$name"; return; fi
  in_netns "$name" "$(node_addr "$1")" "$SLURMD" -D -f "$CONF" -N "$name"
  pid=$(pid_of "$name"); ctl=$(pid_of ctl)
  # always the same MAC: a node that comes back must not be a stale entry in the others' ARP caches
  ip link add "$name" netns "${ctl% *}" type veth \
    peer name eth0 address "$(printf '02:51:00:00:00:%02x' "$1")" netns "${pid% *}"
  nsenter -t "${ctl% *}" -n ip link set "$name" master eth0 up
}

netns_works() {
  [ "$(id -u)" = 0 ] && command -v ip >/dev/null && unshare --net --uts --mount true 2>/dev/null &&
    ip link add slurmtestx type bridge 2>/dev/null && ip link del slurmtestx
}

idle_nodes() { sinfo -h -N -p batch -t idle -o %N 2>/dev/null | sort -u | wc -l; }

up() {
  local n=${1:-2} i t0=$SECONDS
  [[ $n =~ ^[1-9][0-9]?$ ]] || die "up: NODES must be 1 to 99"
  if [ -s "$PIDS" ]; then
    while read -r _ pid st; do
      if alive "$pid" "$st"; then die "already up in $DIR; \`down\` first"; fi
    done <"$PIDS"
  fi
  CPUS=${SLURM_TEST_CPUS:-64} GPUS=${SLURM_TEST_GPUS:-8} MEM=${SLURM_TEST_MEM:-1000000} GPU=${SLURM_TEST_GPU:-h100}
  MODE=${SLURM_TEST_MODE:-host}
  if [ "$MODE" = auto ]; then if netns_works; then MODE=netns; else MODE=host; fi; fi
  for i in slurmctld slurmd munged sbatch; do
    PATH=$PATH:/usr/sbin command -v "$i" >/dev/null ||
      die "no $i: apt-get install slurmctld slurmd slurm-client munge"
  done
  mkdir -p "$DIR/log"
  rm -rf "$DIR/state" "$DIR/spool" "$DIR/run" "$DIR/munge" "$DIR/gpu"; rm -f "$DIR"/log/*; : >"$PIDS"
  configure "$n"
  # whatever ends `up` early, a failure or a signal, ends what it has started
  trap 'exit 1' TERM INT HUP
  trap 'say "up failed; logs in $DIR/log"; tail -n 5 "$DIR"/log/* >&2; down' EXIT

  daemon munged "$(PATH=$PATH:/usr/sbin command -v munged)" -F --key-file="$DIR/etc/munge.key" \
    --socket="$DIR/munge/munge.socket.2" --pid-file="$DIR/munge/munged.pid" \
    --log-file="$DIR/log/munged.log" --seed-file="$DIR/munge/munged.seed"
  for _ in $(seq 100); do [ -S "$DIR/munge/munge.socket.2" ] && break; sleep 0.05; done
  [ -S "$DIR/munge/munge.socket.2" ] || die "munged did not start"

  SLURMD=$(PATH=$PATH:/usr/sbin command -v slurmd)
  start_ctl
  for ((i = 1; i <= n; i++)); do start_node "$i"; done

  for _ in $(seq 300); do [ "$(idle_nodes)" = "$n" ] && break; sleep 0.2; done
  if [ "$(idle_nodes)" != "$n" ]; then
    sinfo -N -l >&2 || true; sinfo -R >&2 || true
    die "not all of $n nodes idle after $((SECONDS - t0)) s"
  fi
  say "$n nodes idle after $((SECONDS - t0)) s ($MODE mode); eval \"\$($0 env)\""
}

down() {
  [ -e "$PIDS" ] || { say "nothing to end in $DIR"; return 0; }
  local name pid st
  if timeout 5 scontrol ping >/dev/null 2>&1; then
    timeout 10 scancel --user="$(id -un)" >/dev/null 2>&1 || true
    for _ in $(seq 50); do
      [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break; sleep 0.2
    done
  fi
  # all but munged at once, then wait for each, munged last
  while read -r name pid st; do
    if [ "$name" != munged ] && alive "$pid" "$st"; then kill -TERM "$pid" 2>/dev/null || true; fi
  done <"$PIDS"
  while read -r name pid st; do stop "$name" "$pid" "$st"; done < <(tac "$PIDS")
  for pid in $(leftovers); do
    say "ending leftover $pid ($(cat "/proc/$pid/comm" 2>/dev/null))"
    kill -KILL "$pid" 2>/dev/null || true
  done
  if [ "${MODE:-}" = netns ]; then ip link del $LINK 2>/dev/null || true; fi
  rm -f "$PIDS"
  say "down"
}

SLURM_CONF=$CONF; export SLURM_CONF
MODE=
# shellcheck disable=SC1091
if [ -e "$DIR/etc/cluster.env" ]; then . "$DIR/etc/cluster.env"; fi
SLURMD=$(PATH=$PATH:/usr/sbin command -v slurmd || true)

case ${1:-} in
  up) shift; up "$@"; trap - TERM INT HUP EXIT ;;
  hold)
    shift; up "$@"
    trap 'exit 0' TERM INT HUP
    trap 'kill "${reader:-}" 2>/dev/null || true; down' EXIT
    # a foreground `read` would hold the traps back until it returned; `wait` does not
    cat <&0 >/dev/null & reader=$!
    echo ready
    wait $reader ;;
  down) down ;;
  env) printf 'export SLURM_CONF=%q\n' "$CONF" ;;
  run) shift; exec "$@" ;;
  node)
    shift; read -r pid st < <(pid_of "$1") || die "no node $1"; shift
    alive "$pid" "$st" || die "its slurmd is not running"
    exec nsenter --target "$pid" --net --uts --mount -- "$@" ;;
  wait)
    end=$((SECONDS + ${3:-300}))
    while :; do
      # one line an array task or het component; a requeued job is PENDING again, not ended
      states=$(scontrol show job -o "$2" | grep -o ' JobState=[A-Z_]*' | cut -d= -f2 | sort -u)
      going='PENDING|CONFIGURING|RUNNING|COMPLETING|SUSPENDED|REQUEUE|RESIZING|STOPPED|SIGNALING|STAGE_OUT'
      grep -qE "$going" <<<"$states" || break
      if ((SECONDS >= end)); then die "job $2 still ${states//$'\n'/,}"; fi
      sleep 0.3
    done
    echo "${states//$'\n'/,}"
    [ "$states" = COMPLETED ] ;;
  kill)
    read -r pid st < <(pid_of "$2") || die "no node $2"
    if alive "$pid" "$st"; then kill -KILL "$pid"; fi
    for pid in $(leftovers "$2"); do kill -KILL "$pid" 2>/dev/null || true; done
    forget "$2" ;;
  start)
    read -r pid st < <(pid_of "$2") || true
    if [ -n "${pid:-}" ] && alive "$pid" "$st"; then die "$2 is running"; fi
    start_node "${2#node}" ;;
  logs) tail -n "${2:-20}" "$DIR"/log/*.log ;;
  status)
    [ -s "$PIDS" ] || { say "not up ($DIR)"; exit 1; }
    rc=0
    while read -r name pid st; do
      if alive "$pid" "$st"; then echo "$name $pid"; else echo "$name $pid DEAD"; rc=1; fi
    done <"$PIDS"
    timeout 10 sinfo -N -l || rc=1
    timeout 10 squeue || rc=1
    exit $rc ;;
  *) sed -n '2,/^set -/p' "$0" | sed '/^set -/d; s/^# \{0,1\}//'; exit 2 ;;
esac
