"""What to call first, in errors of jobs with servers. A module by itself: collective jobs load nothing of servers."""

NO_WORKER = "call fleet.init_worker() first (on a worker)"
NO_SERVER = "call fleet.init_server() before fleet.run_server()"
