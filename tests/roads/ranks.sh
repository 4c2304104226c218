# Starts a program in two processes, as mpirun or srun with a user's own wrapper do: each knows its number, and nothing
# says how many of them are on this machine.
export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT="$PET_MASTER_PORT"
RANK=0 LOCAL_RANK=0 "$@" &
RANK=1 LOCAL_RANK=1 "$@" || exit
wait $!
