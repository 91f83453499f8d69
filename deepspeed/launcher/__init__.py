"""The `deepspeed` command: from one command line to one process per rank.

```
 deepspeed [flags] train.py args          runner      which hosts and slots (hostfile, devices), which port (ports)
   |                                                   watches the launcher; ends what it leaves behind
   v
 python -m deepspeed.launcher.launch      launch      one per host: places (placement), environment, cores (numa)
   |      '- link - the launchers of other hosts      watches the ranks; ends the job, on all hosts, when one fails
   v
 rank 0, rank 1, ...                                   the user's script, each in a session of its own
```

The pure files (`hostfile`, `placement`, `numa`, `arguments`, `environment`) know no processes; `processes` knows nothing of
ranks. Back ends for several machines will be one more pure file of command lines between `runner` and `launch`.
"""

__all__: list[str] = []
