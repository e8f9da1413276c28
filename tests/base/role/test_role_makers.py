"""Who a process is: from FLEET_* or Paddle's variables, or set in code; and what fleet's questions then answer."""

from __future__ import annotations

from typing import Any

import pytest
from support.messages import naming

from torchfleet.base.errors import FleetError, RoleError
from torchfleet.base.role.role_info import HETER_WORKER, SERVER, WORKER, RoleInfo
from torchfleet.base.role.role_makers import PaddleCloudRoleMaker, UserDefinedRoleMaker

SERVERS = "10.0.0.1:7000,10.0.0.2:7001"
WORKERS = "10.0.0.3:1,10.0.0.4:2,10.0.0.5:3"
FLEET_COMMON = {"FLEET_SERVER_ENDPOINTS": SERVERS, "FLEET_NUM_WORKERS": "3", "FLEET_WORKER_ENDPOINTS": WORKERS}
PADDLE_COMMON = {
    "PADDLE_PSERVERS_IP_PORT_LIST": SERVERS,
    "PADDLE_TRAINERS_NUM": "3",
    "PADDLE_TRAINER_ENDPOINTS": WORKERS,
}
ENVIRONMENTS = {
    "fleet worker": {**FLEET_COMMON, "FLEET_ROLE": "WORKER", "FLEET_WORKER_INDEX": "2"},
    "paddle worker": {**PADDLE_COMMON, "TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "2"},
    "fleet server": {**FLEET_COMMON, "FLEET_ROLE": "SERVER", "FLEET_SERVER_INDEX": "1"},
    "paddle server": {**PADDLE_COMMON, "TRAINING_ROLE": "PSERVER", "POD_IP": "10.0.0.2", "PADDLE_PORT": "7001"},
}
THIS_WORKER = RoleInfo(WORKER, 2, 3, 0, tuple(SERVERS.split(",")), tuple(WORKERS.split(",")))
THIS_SERVER = RoleInfo(SERVER, 0, 3, 1, tuple(SERVERS.split(",")), tuple(WORKERS.split(",")))


def read(environment: dict[str, str]) -> RoleInfo:
    return PaddleCloudRoleMaker(environment=environment).read()


def changed(which: str, **variables: str | None) -> dict[str, str]:
    """An environment with some variables set, or with None taken away."""
    environment = {**ENVIRONMENTS[which], **variables}
    return {name: value for name, value in environment.items() if value is not None}


class TestEnvironment:
    @pytest.mark.parametrize("names", ["fleet", "paddle"])
    def test_both_sets_of_names_give_the_same_role(self, names: str) -> None:
        assert read(ENVIRONMENTS[f"{names} worker"]) == THIS_WORKER
        assert read(ENVIRONMENTS[f"{names} server"]) == THIS_SERVER

    def test_no_environment_is_one_local_worker(self) -> None:
        info = read({})
        assert info == RoleInfo()
        assert info.is_local
        assert (info.role, info.worker_index, info.num_workers, info.num_servers) == (WORKER, 0, 1, 1)

    def test_the_environment_of_the_process_is_read_when_none_is_given(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in ENVIRONMENTS["fleet worker"].items():
            monkeypatch.setenv(name, value)
        assert PaddleCloudRoleMaker().read() == THIS_WORKER

    @pytest.mark.parametrize("spelling", ["worker", "Worker", "TRAINER"])
    def test_the_case_and_the_family_of_a_role_do_not_matter(self, spelling: str) -> None:
        assert read(changed("fleet worker", FLEET_ROLE=spelling)) == THIS_WORKER

    @pytest.mark.parametrize(("port", "index"), [("7000", 0), ("7001", 1)])
    def test_a_paddle_server_finds_its_place_by_address_and_port(self, port: str, index: int) -> None:
        servers = "10.0.0.2:7000,10.0.0.2:7001"
        found = read(changed("paddle server", PADDLE_PSERVERS_IP_PORT_LIST=servers, PADDLE_PORT=port))
        assert found.server_index == index

    def test_spaces_in_a_list_do_not_matter(self) -> None:
        spaced = changed("fleet worker", FLEET_SERVER_ENDPOINTS=" 10.0.0.1:7000 , 10.0.0.2:7001,")
        assert read(spaced) == THIS_WORKER

    @pytest.mark.parametrize("which", ENVIRONMENTS)
    def test_addresses_of_workers_may_be_left_out(self, which: str) -> None:
        info = read(changed(which, FLEET_WORKER_ENDPOINTS=None, PADDLE_TRAINER_ENDPOINTS=None))
        assert info.worker_endpoints == ()
        assert info.num_workers == 3

    def test_a_name_may_stand_for_an_address(self) -> None:
        info = read(changed("fleet worker", FLEET_SERVER_ENDPOINTS="server-0.fleet.svc:7000"))
        assert info.server_endpoints == ("server-0.fleet.svc:7000",)

    @pytest.mark.parametrize("environment", [{}, ENVIRONMENTS["fleet worker"], ENVIRONMENTS["paddle server"]])
    def test_what_holds_for_every_role_is_read_for_every_role(self, environment: dict[str, str]) -> None:
        more = {"FLEET_KEY_DIR": "/keys", "FLEET_INSECURE": "1", "FLEET_STATUS_FILE": "/s", "PSERVER_DEBUG": "1"}
        info = read({**environment, **more})
        assert (info.key_dir, info.insecure, info.status_file, info.debug) == ("/keys", True, "/s", True)

    @pytest.mark.parametrize("value", ["", "0"])
    def test_debug_can_be_switched_off_by_its_variable(self, value: str) -> None:
        assert not read({"PSERVER_DEBUG": value}).debug

    @pytest.mark.parametrize("value", ["0", "", "no"])
    def test_only_a_one_makes_a_fleet_insecure(self, value: str) -> None:
        assert not read({"FLEET_INSECURE": value}).insecure

    def test_a_restarted_worker_knows_it(self) -> None:
        assert read(changed("fleet worker", FLEET_RESTART="2")).restart == 2

    def test_time_outs_are_read_for_roles_from_the_environment_and_from_code(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told = {"FLEET_START_TIMEOUT": "60", "FLEET_WORKER_TIMEOUT": "2.5"}
        info = read({**ENVIRONMENTS["fleet worker"], **told})
        assert (info.start_timeout, info.worker_timeout) == (60.0, 2.5)
        for name, value in told.items():
            monkeypatch.setenv(name, value)
        assert UserDefinedRoleMaker().read().worker_timeout == 2.5

    def test_a_server_may_wait_for_workers_for_ever(self) -> None:
        for text, seconds in (("0", 0.0), ("60", 60.0), ("", 1800.0)):
            assert PaddleCloudRoleMaker(environment={"FLEET_ORPHAN_TIMEOUT": text}).read().orphan_timeout == seconds
        with pytest.raises(RoleError, match=naming("FLEET_ORPHAN_TIMEOUT", 0, "'0.5'")):
            PaddleCloudRoleMaker(environment={"FLEET_ORPHAN_TIMEOUT": "0.5"}).read()

    @pytest.mark.parametrize("name", ["FLEET_START_TIMEOUT", "FLEET_WORKER_TIMEOUT"])
    @pytest.mark.parametrize("value", ["0.5", "-1", "nan", "inf", "soon", "1e9"])
    def test_a_time_out_that_is_none_is_refused(self, name: str, value: str) -> None:
        with pytest.raises(RoleError, match=naming(name, 1, 604800, f"'{value}'")):
            read({name: value})


class TestMissing:
    @pytest.mark.parametrize(
        ("name", "value", "missing"),
        [
            ("PADDLE_TRAINERS_NUM", "2", "TRAINING_ROLE"),
            ("FLEET_NUM_WORKERS", "2", "FLEET_ROLE"),
            ("PADDLE_TRAINER_ID", "1", "TRAINING_ROLE"),
            ("FLEET_WORKER_INDEX", "1", "FLEET_ROLE"),
            ("WORLD_SIZE", "2", "FLEET_ROLE"),  # torchrun
        ],
    )
    def test_a_process_that_is_one_of_several_does_not_train_alone(self, name: str, value: str, missing: str) -> None:
        with pytest.raises(RoleError, match=naming(f"{name}={value}", missing)):
            read({name: value})

    def test_one_worker_of_one_may_train_alone(self) -> None:
        assert read({"PADDLE_TRAINERS_NUM": "1", "PADDLE_TRAINER_ID": "0"}).is_local

    @pytest.mark.parametrize(
        ("which", "name"),
        [
            ("fleet worker", "FLEET_SERVER_ENDPOINTS"),
            ("fleet worker", "FLEET_NUM_WORKERS"),
            ("fleet worker", "FLEET_WORKER_INDEX"),
            ("fleet server", "FLEET_SERVER_ENDPOINTS"),
            ("fleet server", "FLEET_NUM_WORKERS"),
            ("fleet server", "FLEET_SERVER_INDEX"),
            ("paddle worker", "PADDLE_PSERVERS_IP_PORT_LIST"),
            ("paddle worker", "PADDLE_TRAINERS_NUM"),
            ("paddle worker", "PADDLE_TRAINER_ID"),
            ("paddle server", "PADDLE_PSERVERS_IP_PORT_LIST"),
            ("paddle server", "PADDLE_TRAINERS_NUM"),
            ("paddle server", "POD_IP"),
            ("paddle server", "PADDLE_PORT"),
        ],
    )
    @pytest.mark.parametrize("missing", [None, ""], ids=["unset", "empty"])
    def test_a_missing_variable_is_named_with_the_way_out(self, which: str, name: str, missing: str | None) -> None:
        with pytest.raises(RoleError) as caught:
            read(changed(which, **{name: missing}))
        assert name in str(caught.value)
        assert "missing" in str(caught.value)
        assert "fleetrun" in str(caught.value)

    @pytest.mark.parametrize(
        ("which", "name"),
        [
            ("fleet worker", "FLEET_ROLE"),
            ("fleet server", "FLEET_ROLE"),
            ("paddle worker", "TRAINING_ROLE"),
            ("paddle server", "TRAINING_ROLE"),
        ],
    )
    def test_a_fleet_without_a_role_is_not_taken_for_a_local_worker(self, which: str, name: str) -> None:
        """Addresses of servers are there, so somebody meant a fleet: training alone would be a silent mistake."""
        with pytest.raises(RoleError, match=name):
            read(changed(which, **{name: None}))


class TestMalformed:
    @pytest.mark.parametrize(
        ("which", "name", "value"),
        [
            ("fleet worker", "FLEET_ROLE", "BOSS"),
            ("paddle worker", "TRAINING_ROLE", "BOSS"),
            *(("fleet worker", "FLEET_NUM_WORKERS", value) for value in ("0", "-1", "x", "1.5", "--5", "²", " ")),
            *(("paddle worker", "PADDLE_TRAINERS_NUM", value) for value in ("0", "x", "--5")),
            *(("fleet worker", "FLEET_WORKER_INDEX", value) for value in ("-1", "x", "1e0", "--1", "²")),
            *(("paddle worker", "PADDLE_TRAINER_ID", value) for value in ("-1", "x")),
            *(("fleet server", "FLEET_SERVER_INDEX", value) for value in ("-1", "x", "--1")),
            ("fleet worker", "FLEET_RESTART", "x"),
        ],
    )
    def test_a_malformed_number_or_role_is_named_with_what_was_found(self, which: str, name: str, value: str) -> None:
        with pytest.raises(RoleError) as caught:
            read(changed(which, **{name: value}))
        assert name in str(caught.value)
        assert repr(value) in str(caught.value)

    @pytest.mark.parametrize("place", ["10.0.0.9", "10.0.0.9:", ":7000", "10.0.0.9:x", "10.0.0.9:70000", "10.0.0.9:²"])
    def test_a_malformed_address_is_shown(self, place: str) -> None:
        with pytest.raises(RoleError, match="host:port") as caught:
            read(changed("fleet worker", FLEET_SERVER_ENDPOINTS=f"10.0.0.1:7000,{place}"))
        assert repr(place) in str(caught.value)

    def test_an_address_that_appears_twice_is_shown(self) -> None:
        with pytest.raises(RoleError, match=naming("10.0.0.1:7000")):
            read(changed("fleet worker", FLEET_SERVER_ENDPOINTS="10.0.0.1:7000,10.0.0.1:7000"))

    @pytest.mark.parametrize(
        ("which", "name"),
        [
            ("fleet worker", "FLEET_SERVER_ENDPOINTS"),
            ("fleet worker", "FLEET_WORKER_ENDPOINTS"),
            ("paddle server", "PADDLE_PSERVERS_IP_PORT_LIST"),
            ("paddle server", "PADDLE_TRAINER_ENDPOINTS"),
        ],
    )
    @pytest.mark.parametrize("value", ["10.0.0.1:7000,10.0.0.9", "10.0.0.1:7000,10.0.0.1:7000"])
    def test_the_variable_of_a_malformed_list_is_named(self, which: str, name: str, value: str) -> None:
        with pytest.raises(RoleError, match=name):
            read(changed(which, **{name: value}))

    @pytest.mark.parametrize("which", ["fleet worker", "fleet server"])
    @pytest.mark.parametrize("value", [",", " ", " , "])
    def test_a_list_without_addresses_does_not_make_a_local_worker(self, which: str, value: str) -> None:
        with pytest.raises(RoleError, match="FLEET_SERVER_ENDPOINTS"):
            read(changed(which, FLEET_SERVER_ENDPOINTS=value))


class TestContradictory:
    @pytest.mark.parametrize(
        ("which", "variables", "names"),
        [
            ("fleet worker", {"FLEET_WORKER_INDEX": "3"}, ("FLEET_WORKER_INDEX", "3 workers")),
            ("paddle worker", {"PADDLE_TRAINER_ID": "3"}, ("PADDLE_TRAINER_ID", "3 workers")),
            ("fleet server", {"FLEET_SERVER_INDEX": "2"}, ("FLEET_SERVER_INDEX", "2")),
            ("fleet worker", {"FLEET_NUM_WORKERS": "4"}, ("FLEET_WORKER_ENDPOINTS", "FLEET_NUM_WORKERS")),
            ("paddle worker", {"PADDLE_TRAINERS_NUM": "4"}, ("PADDLE_TRAINER_ENDPOINTS", "PADDLE_TRAINERS_NUM")),
            ("paddle server", {"PADDLE_TRAINERS_NUM": "4"}, ("PADDLE_TRAINER_ENDPOINTS", "PADDLE_TRAINERS_NUM")),
            ("paddle server", {"POD_IP": "10.0.0.9"}, ("POD_IP", "PADDLE_PORT", "10.0.0.9:7001", SERVERS[:13])),
            ("paddle server", {"PADDLE_PORT": "7009"}, ("POD_IP", "PADDLE_PORT", "10.0.0.2:7009")),
        ],
    )
    def test_variables_that_do_not_agree_are_named(
        self, which: str, variables: dict[str, str], names: tuple[str, ...]
    ) -> None:
        with pytest.raises(RoleError) as caught:
            read(changed(which, **variables))
        for name in names:
            assert name in str(caught.value)

    @pytest.mark.parametrize(
        ("ours", "theirs", "value"),
        [
            ("FLEET_ROLE", "TRAINING_ROLE", "PSERVER"),
            ("FLEET_NUM_WORKERS", "PADDLE_TRAINERS_NUM", "4"),
            ("FLEET_WORKER_INDEX", "PADDLE_TRAINER_ID", "0"),
            ("FLEET_SERVER_ENDPOINTS", "PADDLE_PSERVERS_IP_PORT_LIST", "10.0.0.1:7000"),
        ],
    )
    def test_our_name_and_paddles_for_one_thing_must_agree(self, ours: str, theirs: str, value: str) -> None:
        with pytest.raises(RoleError) as caught:
            read(changed("fleet worker", **{theirs: value}))
        assert ours in str(caught.value)
        assert theirs in str(caught.value)

    def test_our_names_and_paddles_may_stand_side_by_side(self) -> None:
        assert read({**ENVIRONMENTS["fleet worker"], **ENVIRONMENTS["paddle worker"]}) == THIS_WORKER


class TestHeterWorkers:
    @pytest.mark.parametrize(
        "variables",
        [
            {"TRAINING_ROLE": "HETER_TRAINER", "PADDLE_HETER_TRAINER_IP_PORT_LIST": "h:7100,h:7101"},
            {"TRAINING_ROLE": "HETER_TRAINER", "PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST": "h:7100,h:7101"},
            {"TRAINING_ROLE": "HETER_TRAINER", "FLEET_HETER_ENDPOINTS": "h:7100,h:7101", "FLEET_HETER_INDEX": "1"},
        ],
    )
    def test_a_heter_worker_finds_its_index(self, variables: dict[str, str]) -> None:
        found = read(changed("paddle worker", POD_IP="h", PADDLE_PORT="7101", **variables))
        assert (found.role, found.heter_index, found.heter_endpoints) == (HETER_WORKER, 1, ("h:7100", "h:7101"))
        assert found.index_on_machine == 1

    def test_workers_learn_where_heter_workers_are(self) -> None:
        found = read(changed("fleet worker", FLEET_HETER_ENDPOINTS="h:7100"))
        assert (found.role, found.heter_endpoints) == (WORKER, ("h:7100",))

    def test_a_heter_worker_is_set_in_code(self) -> None:
        places = {"server_endpoints": ["s:7000"], "heter_worker_endpoints": ["h:7100", "h:7101"]}
        maker = UserDefinedRoleMaker(1, HETER_WORKER, 3, **places)  # type: ignore[arg-type]
        assert (maker.is_heter_worker(), maker.is_worker(), maker.is_server()) == (True, False, False)
        assert (maker.heter_worker_num(), maker.worker_num(), maker.read().heter_index) == (2, 3, 1)
        with pytest.raises(RoleError, match=naming("current_id", 2)):
            UserDefinedRoleMaker(2, HETER_WORKER, 3, **places)  # type: ignore[arg-type]
        with pytest.raises(RoleError, match=naming("server_endpoints")):
            UserDefinedRoleMaker(0, heter_worker_endpoints=["h:7100"])

    def test_a_heter_worker_without_a_place_is_refused(self) -> None:
        with pytest.raises(RoleError, match=naming("FLEET_HETER_ENDPOINTS")):
            read(changed("fleet worker", FLEET_ROLE="HETER_WORKER"))
        wrong = {"FLEET_ROLE": "HETER_WORKER", "FLEET_HETER_ENDPOINTS": "h:7100", "FLEET_HETER_INDEX": "1"}
        with pytest.raises(RoleError, match=naming("FLEET_HETER_INDEX", "1")):
            read(changed("fleet worker", **wrong))


def collective(**environment: str) -> RoleInfo:
    return PaddleCloudRoleMaker(is_collective=True, environment=environment).read()


TORCH = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "7"}
PADDLE = {"PADDLE_TRAINER_ID": "1", "PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ENDPOINTS": "a:7,b:8"}


class TestCollective:
    def test_without_an_environment_there_is_one_rank(self) -> None:
        info = collective()
        assert (info.worker_index, info.num_workers, info.is_collective, info.is_local) == (0, 1, True, False)

    def test_the_names_of_torch_are_read(self) -> None:
        info = collective(**TORCH, TORCHELASTIC_RESTART_COUNT="3")
        assert (info.worker_index, info.num_workers, info.local_rank, info.master) == (2, 4, 1, "")
        assert info.restart == 3

    def test_the_names_of_paddle_are_read(self) -> None:
        info = collective(**PADDLE, FLAGS_selected_gpus="1")
        assert (info.worker_index, info.num_workers, info.local_rank, info.master) == (1, 2, 1, "a:7")
        assert info.worker_endpoints == ("a:7", "b:8")

    @pytest.mark.parametrize(
        ("environment", "text"),
        [
            ({**TORCH, "RANK": "4"}, "RANK 4"),
            ({**TORCH, "WORLD_SIZE": "x"}, "WORLD_SIZE 'x'"),
            ({name: value for name, value in TORCH.items() if name != "RANK"}, "WORLD_SIZE RANK"),
            ({name: value for name, value in TORCH.items() if name != "WORLD_SIZE"}, "RANK WORLD_SIZE"),
            ({name: value for name, value in TORCH.items() if name != "MASTER_PORT"}, "MASTER_PORT"),
            ({**PADDLE, "PADDLE_TRAINER_ENDPOINTS": "a:7"}, "1 2"),
            ({"PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "2"}, "PADDLE_TRAINER_ENDPOINTS"),
            ({**PADDLE, "FLAGS_selected_gpus": "0,1"}, "FLAGS_selected_gpus"),
            ({"FLEET_SERVER_ENDPOINTS": "a:7"}, "servers"),
        ],
    )
    def test_what_is_missing_or_contradicts_itself_is_named(self, environment: dict[str, str], text: str) -> None:
        with pytest.raises(RoleError, match=naming(*text.split())):
            collective(**environment)


class TestUserDefinedRoleMaker:
    def test_a_worker_and_a_server_are_as_they_were_told(self) -> None:
        told: dict[str, Any] = {
            "worker_num": 3,
            "server_endpoints": SERVERS.split(","),
            "worker_endpoints": WORKERS.split(","),
        }
        assert UserDefinedRoleMaker(2, "worker", **told).read() == THIS_WORKER
        assert UserDefinedRoleMaker(1, "server", **told).read() == THIS_SERVER

    def test_nothing_told_is_one_local_worker(self) -> None:
        assert UserDefinedRoleMaker().read() == RoleInfo()

    def test_keys_are_passed_on(self) -> None:
        info = UserDefinedRoleMaker(server_endpoints=["10.0.0.1:7000"], key_dir="/keys", insecure=True).read()
        assert (info.key_dir, info.insecure) == ("/keys", True)

    @pytest.mark.parametrize(
        ("told", "message"),
        [
            ({"role": "boss"}, "role 'worker' 'server' 'boss'"),
            ({"role": "SERVER", "server_endpoints": ["a:1"]}, "role 'SERVER'"),
            ({"current_id": -1}, "current_id -1"),
            ({"current_id": 1}, "current_id 1 workers"),
            ({"current_id": 2, "worker_num": 2, "server_endpoints": ["a:1"]}, "current_id 2 workers"),
            ({"current_id": 1, "role": "server", "server_endpoints": ["a:1"]}, "current_id 1 servers"),
            ({"role": "server"}, "server_endpoints"),
            ({"worker_num": 2}, "server_endpoints"),
            ({"server_endpoints": ["a"]}, "host:port 'a'"),
            ({"server_endpoints": ["a:1", "a:1"]}, "a:1"),
            ({"server_endpoints": ["a:1"], "worker_endpoints": ["b"]}, "host:port 'b'"),
            ({"worker_num": 0}, "worker_num 0"),
            ({"worker_num": -2, "server_endpoints": ["a:1"]}, "worker_num -2"),
            ({"worker_num": 0, "role": "server", "server_endpoints": ["a:1"]}, "worker_num 0"),
            (
                {"worker_num": 2, "server_endpoints": ["a:1"], "worker_endpoints": ["b:1", "c:1", "d:1"]},
                "worker_endpoints 3 worker_num 2",
            ),
        ],
    )
    def test_a_wrong_role_is_refused_where_it_is_made(self, told: dict[str, Any], message: str) -> None:
        with pytest.raises(RoleError, match=naming(*message.split())):
            UserDefinedRoleMaker(**told)


class TestFacade:
    """fleet.init, and the functions of fleet that tell the role."""

    @pytest.fixture(autouse=True)
    def fleet(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        import torchfleet as fleet
        from torchfleet.api.current_job import current

        monkeypatch.setattr(current, "job", None)
        for environment in ENVIRONMENTS.values():
            for name in environment:
                monkeypatch.delenv(name, raising=False)
        return fleet

    def test_a_process_without_a_role_is_the_only_worker(self, fleet: Any) -> None:
        fleet.init()
        assert fleet.is_worker()
        assert fleet.is_first_worker()
        assert not fleet.is_server()
        assert (fleet.worker_index(), fleet.worker_num(), fleet.server_num()) == (0, 1, 1)
        assert fleet.server_endpoints() == fleet.worker_endpoints() == []

    def test_a_worker_set_in_code_answers_as_it_was_told(self, fleet: Any) -> None:
        fleet.init(UserDefinedRoleMaker(2, "worker", 3, SERVERS.split(","), WORKERS.split(",")))
        assert fleet.is_worker()
        assert not fleet.is_first_worker()
        assert (fleet.worker_index(), fleet.worker_num(), fleet.server_num()) == (2, 3, 2)
        assert fleet.server_endpoints() == SERVERS.split(",")
        assert fleet.server_endpoints(to_string=True) == SERVERS
        assert fleet.worker_endpoints(to_string=True) == WORKERS

    def test_a_server_of_the_environment_answers_as_it_was_told(
        self, fleet: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in ENVIRONMENTS["paddle server"].items():
            monkeypatch.setenv(name, value)
        fleet.init()
        assert fleet.is_server()
        assert not fleet.is_worker()
        assert not fleet.is_first_worker()
        assert (fleet.server_index(), fleet.server_num(), fleet.worker_num()) == (1, 2, 3)

    @pytest.mark.parametrize("name", ["is_server", "is_worker", "worker_index", "worker_num", "server_endpoints"])
    def test_nothing_is_answered_before_init(self, fleet: Any, name: str) -> None:
        with pytest.raises(FleetError, match=naming("fleet.init()")):
            getattr(fleet, name)()

    def test_init_may_be_called_again_while_nothing_is_under_way(self, fleet: Any) -> None:
        fleet.init()
        fleet.init(UserDefinedRoleMaker())
        assert (fleet.worker_num(), fleet.is_worker()) == (1, True)

    def test_a_role_maker_for_the_other_kind_of_job_is_an_error(self, fleet: Any) -> None:
        with pytest.raises(RoleError):
            fleet.init(UserDefinedRoleMaker(), is_collective=True)
        with pytest.raises(RoleError):
            fleet.init(PaddleCloudRoleMaker(is_collective=True, environment={}))

    def test_a_worker_cannot_do_what_servers_do(self, fleet: Any) -> None:
        fleet.init(UserDefinedRoleMaker(0, "worker", 3, SERVERS.split(",")))
        with pytest.raises(FleetError, match=naming("init_server", "is_server()")):
            fleet.init_server()
        with pytest.raises(FleetError, match=naming("init_server()")):
            fleet.run_server()

    def test_a_server_cannot_do_what_workers_do(self, fleet: Any) -> None:
        fleet.init(UserDefinedRoleMaker(1, "server", 3, SERVERS.split(",")))
        with pytest.raises(FleetError, match=naming("init_worker", "is_server()")):
            fleet.init_worker()
        for name in ("stop_worker", "barrier_worker", "flush", "stats"):
            with pytest.raises(FleetError, match=naming("init_worker()")):
                getattr(fleet, name)()

    @pytest.mark.parametrize("role", ["worker", "server"])
    def test_model_and_optimizer_come_before_the_role_starts(self, fleet: Any, role: str) -> None:
        fleet.init(UserDefinedRoleMaker(0, role, 1, ["127.0.0.1:1"]))
        with pytest.raises(FleetError, match=naming("distributed_model", "fleet.distributed_optimizer")):
            fleet.init_worker() if role == "worker" else fleet.init_server()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 1),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, 4),
        ({"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, 0),
        (
            {
                "PADDLE_TRAINER_ID": "1",
                "PADDLE_TRAINERS_NUM": "3",
                "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:6170,10.0.0.2:6170,10.0.0.2:6171",
            },
            2,
        ),
    ],
)
def test_a_rank_knows_how_many_its_machine_has(environment: dict[str, str], expected: int) -> None:
    assert PaddleCloudRoleMaker(is_collective=True, environment=environment).read().local_size == expected
