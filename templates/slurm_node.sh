#!/bin/bash
# Started by srun, once on each node, from job.sbatch beside it: readies the environment and becomes the node's agent.
#   node.sh SETUP NODES RENDEZVOUS COMMAND...
#   SETUP       script to source first (modules, paths); empty: none
#   NODES       how many nodes take part; with more than one, the command is told which it is and where they meet
#   RENDEZVOUS  HOST:PORT of the first
# The names are long because one of the run's own variables may be called setup or nodes.
partool_setup=$1 partool_nodes=$2 partool_rendezvous=$3
shift 3

# What a site's hooks (pyxis: 50-slurm-pytorch.sh) or the shell that submitted left behind; ranks number themselves.
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_NAME ROLE_WORLD_SIZE
unset MASTER_ADDR MASTER_PORT NODE_RANK NNODES "${!PET_@}" "${!TORCHELASTIC_@}"

if [ "$partool_nodes" -gt 1 ]; then
  # SLURM_NODEID is right only here, within the task; in the batch script it is 0 for everyone.
  if [ -z "${SLURM_NODEID:-}" ]; then
    echo "partool: srun did not say which node this is ($(hostname))" >&2
    exit 78
  fi
  set -- "$@" --nodes "$partool_nodes" --node-rank "$SLURM_NODEID" --rendezvous "$partool_rendezvous"
fi
partool_command=("$@")
set -- # a script that is sourced would take these words for its own

if [ -n "$partool_setup" ]; then
  case $partool_setup in /*) ;; *) partool_setup=$PWD/$partool_setup ;; esac
  if [ ! -r "$partool_setup" ]; then
    echo "partool: launch.slurm.setup: no $partool_setup on $(hostname)" >&2
    exit 78
  fi
  # shellcheck disable=SC1090
  . "$partool_setup" || echo "partool: $partool_setup ended with code $? on $(hostname)" >&2
fi

shopt -s execfail
exec "${partool_command[@]}"
echo "partool: cannot start ${partool_command[0]} on $(hostname)" >&2
exit 78
