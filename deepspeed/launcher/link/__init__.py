"""The link between the launchers of a job on several hosts: one cause for its end, and everybody hears it.

```
   front end (`front`) ----.        the hub (`hub` decides, `server` has its sockets) is the launcher of rank 0
   launcher 1 (`client`) --+--> hub
   launcher 2 (`client`) --'        `member`: one side's state;  `messages`: what is said;  `wire`: over what
```

The link is made on the port where the ranks will meet, before they do (docs/adr/0013). `launch` opens it (`opening`); the
runner uses `front.FrontEnd`. A job of one launcher loads `cause` alone.
"""

__all__: list[str] = []
