"""What to call first, for errors of jobs with servers. In its own module: collective jobs load nothing of servers."""

NO_WORKER = "call fleet.init_worker() first (on a worker)"
NO_SERVER = "call fleet.init_server() before fleet.run_server()"
