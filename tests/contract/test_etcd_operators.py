"""The store's errors name what operators must fix in etcd: space, users, certificates."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.errors import ConfigurationError, ElasticError, TransientError
from elastic.store.etcd.endpoints import EtcdOptions, etcd_options
from elastic.store.etcd.store import EtcdStore
from tests.certificates import Certificates, make_certificates, sign
from tests.contract.conftest import take, within_deadline
from tests.etcd_cluster import EtcdCluster, etcd_cluster, free_ports

TOKEN_TTL_S = 1


async def test_writes_to_an_etcd_without_space_fail_until_space_is_made() -> None:
    with etcd_cluster("--quota-backend-bytes=1000000", size=1) as cluster:
        async with EtcdStore(cluster.options()) as store:
            lease = await store.grant(60.0)
            with pytest.raises(TransientError, match=r"NOSPACE alarm.*compact and defragment"):
                await _fill(store)
            assert await store.get("filling") is not None
            await store.renew(lease)
            await asyncio.to_thread(cluster.make_space)
            await store.put("a", b"1")


async def _fill(store: EtcdStore) -> None:
    for _ in range(100):
        await store.put("filling", bytes(100_000))


@pytest.fixture(scope="module")
def guarded() -> Iterator[EtcdCluster]:
    """In this etcd "ml" may do everything below "ml/"; tokens expire after a second without use."""
    flags = ("--auth-token=simple", f"--auth-token-ttl={TOKEN_TTL_S}")
    with etcd_cluster(*flags) as cluster:
        for command in (
            "user add root:secret",
            "user grant-role root root",
            "role add team",
            "role grant-permission team readwrite --prefix=true ml/",
            "user add ml:hers",
            "user grant-role ml team",
            "auth enable",
        ):
            cluster.ctl(*command.split())
        yield cluster


def _as_user(cluster: EtcdCluster, user: str, password: str, namespace: str = "ml/") -> EtcdOptions:
    return etcd_options(cluster.endpoints(), user=user, password=password, namespace=namespace)


async def test_a_token_that_expires_is_renewed(guarded: EtcdCluster) -> None:
    async with EtcdStore(_as_user(guarded, "ml", "hers")) as store:
        before = await store.put("job/a", b"0")
        changes = store.watch("job/", after=before.modified)
        telling = asyncio.create_task(take(changes, 2))
        lease = await store.grant(60.0)
        first = store._client._tokens._token
        await asyncio.sleep(TOKEN_TTL_S * 2.5)  # etcd looks for unused tokens every second
        await store.renew(lease)
        written = [await store.put("job/a", b"%d" % i) for i in range(2)]
        assert store._client._tokens._token != first
        assert [change.entry for change in await telling] == written


async def test_a_watch_with_an_expired_token_goes_on_with_a_new_one(guarded: EtcdCluster) -> None:
    async with EtcdStore(_as_user(guarded, "ml", "hers")) as store:
        before = await store.put("job/a", b"0")
        store._client._tokens._token = "expired.1"
        changes = store.watch("job/", after=before.modified - 1)
        assert (await anext(changes)).entry == before


@pytest.mark.parametrize("user", ["ml", "nobody"])
def test_a_wrong_user_or_password_is_a_configuration_error(guarded: EtcdCluster, user: str) -> None:
    _never_works(_as_user(guarded, user, "wrong"), "the user or the password is wrong")


def test_a_missing_user_is_a_configuration_error(guarded: EtcdCluster) -> None:
    _never_works(guarded.options(), "it requires a user and a password")


def test_a_missing_permission_is_a_configuration_error(guarded: EtcdCluster) -> None:
    _never_works(_as_user(guarded, "ml", "hers", "others/"), "needs a role that may read and write")


def test_a_user_is_refused_where_etcd_has_no_authentication(shared_cluster: EtcdCluster) -> None:
    _never_works(_as_user(shared_cluster, "ml", "hers"), "run `etcdctl auth enable`")


async def test_a_user_that_is_deleted_later_is_a_transient_error(guarded: EtcdCluster) -> None:

    guarded.ctl("user", "add", "brief:1", user="root:secret")
    guarded.ctl("user", "grant-role", "brief", "team", user="root:secret")
    async with EtcdStore(_as_user(guarded, "brief", "1")) as store:
        await store.put("brief", b"1")
        await asyncio.to_thread(guarded.ctl, "user", "delete", "brief", user="root:secret")
        with pytest.raises(TransientError) as caught:
            await store.put("brief", b"2")
        assert not isinstance(caught.value, ConfigurationError)


@dataclasses.dataclass(frozen=True)
class Tls:
    cluster: EtcdCluster
    made: Certificates
    others: Certificates

    def options(self, scheme: str = "https", **files: Path | None) -> EtcdOptions:
        good = {
            "ca": self.made.ca,
            "certificate": self.made.certificate("client"),
            "key": self.made.key("client"),
        }
        return etcd_options(self.cluster.endpoints(scheme), **(good | files))


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tls]:
    """A cluster that asks for certificates, and certificates of another authority."""
    directory = tmp_path_factory.mktemp("tls")
    made = make_certificates(directory / "made", "server", "client")
    others = make_certificates(directory / "others", "client")
    with etcd_cluster(certificates=made) as cluster:
        yield Tls(cluster, made, others)


async def test_writes_watches_and_leases_work_over_mutual_tls(tls: Tls) -> None:
    async with EtcdStore(tls.options()) as store:
        entry = await store.put("a", b"1")
        assert (await anext(store.watch("a", after=entry.modified - 1))).entry == entry
        await store.renew(await store.grant(60.0))


def test_a_server_certificate_of_another_authority_is_refused(tls: Tls) -> None:
    _never_works(tls.options(ca=tls.others.ca), "TLS to etcd fails .*CERTIFICATE_VERIFY_FAILED")


def test_a_client_certificate_of_another_authority_is_refused(tls: Tls) -> None:
    options = tls.options(
        certificate=tls.others.certificate("client"), key=tls.others.key("client")
    )
    _never_works(options, "TLS to etcd fails")


def test_a_missing_client_certificate_is_refused(tls: Tls) -> None:
    _never_works(tls.options(certificate=None, key=None), "TLS to etcd fails")


def test_tls_files_that_cannot_be_used_are_named(tls: Tls, tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("garbage")
    _never_works(tls.options(ca=garbage), f"authority {garbage} cannot be used")
    _never_works(tls.options(ca=tmp_path / "absent"), "absent cannot be used.*No such file")
    _never_works(tls.options(key=tls.made.key("server")), "client.pem, .*server.key.*mismatch")


def test_plain_text_to_members_with_tls_fails_with_a_hint(tls: Tls) -> None:
    plain = etcd_options(tls.cluster.endpoints("http"))
    _fails(
        dataclasses.replace(plain, total_timeout_s=0.5),
        TransientError,
        "that http or https is right",
    )


async def test_replaced_certificates_are_read_at_the_next_connection(tmp_path: Path) -> None:
    """The files are wrong at first. The same store works once they are right."""
    made = make_certificates(tmp_path / "made", "server", "client")
    others = make_certificates(tmp_path / "others", "client")
    right = made.certificate("client").read_bytes(), made.key("client").read_bytes()
    _replace(made, others.certificate("client").read_bytes(), others.key("client").read_bytes())

    with etcd_cluster(size=1, certificates=made) as cluster:
        async with EtcdStore(Tls(cluster, made, others).options()) as store:
            with pytest.raises(ConfigurationError):
                await store.get("a")
            _replace(made, *right)
            await store.put("a", b"1")


async def test_a_watch_outlives_the_replacement_of_certificates(tls: Tls) -> None:
    async with EtcdStore(tls.options()) as store:
        before = await store.put("a", b"1")
        changes = store.watch("a", after=before.modified - 1)
        assert (await anext(changes)).entry == before
        telling = asyncio.create_task(take(changes, 1))
        sign(tls.made, "client")
        connection = store._client._failover.current
        old = connection._channel
        connection.failed()
        written = await store.put("a", b"2")
        assert connection._channel is not old
        assert [change.entry for change in await telling] == [written]


def _replace(made: Certificates, certificate: bytes, key: bytes) -> None:
    made.certificate("client").write_bytes(certificate)
    made.key("client").write_bytes(key)


def test_an_expired_client_certificate_is_refused(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "made", "server", "client")
    sign(made, "client", days=-1)

    with etcd_cluster(size=1, certificates=made) as cluster:
        _never_works(Tls(cluster, made, made).options(), "TLS to etcd fails")


async def test_a_server_that_is_not_etcd_is_a_transient_error_with_its_address() -> None:
    (port,) = free_ports(1)
    server = await asyncio.start_server(_talk_garbage, "127.0.0.1", port)
    async with server:
        options = etcd_options(f"127.0.0.1:{port}")
        async with EtcdStore(dataclasses.replace(options, total_timeout_s=0.5)) as store:
            with pytest.raises(TransientError, match=f"127.0.0.1:{port}: "):
                await store.get("a")


async def _talk_garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    del reader
    writer.write(b"220 mail.example.org ESMTP\r\n")
    writer.close()


def _never_works(options: EtcdOptions, why: str) -> None:
    _fails(options, ConfigurationError, why)


def _fails(options: EtcdOptions, kind: type[ElasticError], why: str) -> None:
    """Check that a write fails so, and for a ConfigurationError a watch too."""

    async def check() -> None:
        async with EtcdStore(options) as store:
            with pytest.raises(kind, match=why):
                await store.put("a", b"1")
            if kind is ConfigurationError:
                with pytest.raises(kind, match=why):
                    await anext(store.watch("a", after=0))

    within_deadline(check())
