#!/bin/bash
# Started by srun, once on each node, from job.sbatch beside it: readies the environment and becomes the node's agent.
#   node.sh MARK SETUP NODES RENDEZVOUS COMMAND...
#   MARK        file to leave where this node cannot take part, however often it is tried: srun kills the others for
#               waiting, and its own code then says no more than that
#   SETUP       script to source first (modules, paths); empty: none
#   NODES       how many nodes take part; with more than one, the command is told which it is and where they meet
#   RENDEZVOUS  HOST:PORT of the first
# The names are long because one of the run's own variables may be called setup or nodes.
partool_mark=$1 partool_setup=$2 partool_nodes=$3 partool_rendezvous=$4
shift 4

partool_refuse() {
  echo "partool: $*" >&2
  : > "$partool_mark"
  exit 78
}

# What a site's hooks (pyxis: 50-slurm-pytorch.sh) or the shell that submitted left behind; ranks number themselves.
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_NAME ROLE_WORLD_SIZE
unset MASTER_ADDR MASTER_PORT NODE_RANK NNODES "${!PET_@}" "${!TORCHELASTIC_@}"

if [ "$partool_nodes" -gt 1 ]; then
  # SLURM_NODEID is right only here, within the task; in the batch script it is 0 for everyone.
  if [ -z "${SLURM_NODEID:-}" ]; then
    partool_refuse "srun did not say which node this is ($(hostname))"
  fi
  set -- "$@" --nodes "$partool_nodes" --node-rank "$SLURM_NODEID" --rendezvous "$partool_rendezvous"
fi
partool_command=("$@")
set -- # a script that is sourced would take these words for its own

if [ -n "$partool_setup" ]; then
  case $partool_setup in /*) ;; *) partool_setup=$PWD/$partool_setup ;; esac
  if [ ! -r "$partool_setup" ]; then
    partool_refuse "launch.slurm.setup: no $partool_setup on $(hostname)"
  fi
  # shellcheck disable=SC1090
  . "$partool_setup" || echo "partool: note: $partool_setup ended with code $? on $(hostname)" >&2
fi

shopt -s execfail
exec "${partool_command[@]}"
partool_refuse "cannot start ${partool_command[0]} on $(hostname)"
