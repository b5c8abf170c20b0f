/* Preloaded into every process of a job: counts calls by process and role, and makes one fail.
 *
 * FAULTS_FOLDER   has the counters of each process and a shared file `point`: the test writes
 *                 there, at any time, which call must fail, and the library which one has failed
 * FAULTS_UNDER    paths that begin with this belong to the job
 *
 * A process counts from the begin of its own work, not while Python starts and imports.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* In the order of points.py. */
enum { FORK, THREAD, OPEN, READ, WRITE, FSYNC, RENAME, MKDIR, SOCKET, CONNECT, ACCEPT, SEND, RECV,
       PIPE, EPOLL, MMAP, FUNCTIONS };
enum { NOBODY, RUN, COORDINATOR, AGENT, KEEPER, ZYGOTE, WORKER, WRITER };
static const char *const roles[] = {"", "run", "coordinator", "agent", "keeper", "zygote",
                                    "worker", "writer"};

/* Laid out as in armed.py, which writes `role` last. */
struct point {
    int32_t role, function, error, pid; /* pid: the process that counts from now on, or 0: the first
                                         * process whose count from its begin reaches `number` */
    uint32_t number, calls;
    int32_t fired, fired_pid, fired_error; /* fired: 1 while `told` is written, then 2 */
    char told[988];
};
static struct point nothing, *point = &nothing;

static int role, begun, of_pid, first_pid, forks;
static __thread int refused_with; /* the error of this thread's call that failed */
static char folder[512], under[512];
static uint32_t none[FUNCTIONS], *counters = none;

static int contains(const char *text, size_t length, const char *what) {
    return memmem(text, length, what, strlen(what)) != NULL;
}

__attribute__((constructor)) static void begin(void) {
    const char *at = getenv("FAULTS_FOLDER"), *own = getenv("FAULTS_UNDER");
    if (!at || !own) return;
    snprintf(folder, sizeof folder, "%s", at);
    snprintf(under, sizeof under, "%s", own);
    char line[4096];
    int fd = syscall(SYS_openat, AT_FDCWD, "/proc/self/cmdline", O_RDONLY);
    long length = syscall(SYS_read, fd, line, sizeof line - 1);
    syscall(SYS_close, fd);
    if (length <= 0) return;
    if (contains(line, length, "elastic.runtime.keeper")) role = KEEPER;
    else if (contains(line, length, "elastic.worker.process.zygote")) role = ZYGOTE;
    else if (contains(line, length, "elastic.cli")) {
        if (memmem(line, length, "\0run", 5)) role = RUN;
        else if (memmem(line, length, "\0coordinator", 13)) role = COORDINATOR;
        else if (memmem(line, length, "\0agent", 7)) role = AGENT;
    }
    first_pid = of_pid = getpid();
    if (!role) return;
    snprintf(line, sizeof line, "%s/point", folder);
    fd = syscall(SYS_openat, AT_FDCWD, line, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void *shared = (void *)syscall(SYS_mmap, 0, sizeof *point, PROT_READ | PROT_WRITE, MAP_SHARED,
                                   fd, 0);
    syscall(SYS_close, fd);
    if (shared != MAP_FAILED) point = shared;
}

static void keep_counters(void) {
    char path[600];
    snprintf(path, sizeof path, "%s/%s.%d", folder, roles[role], of_pid);
    int fd = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) return;
    syscall(SYS_ftruncate, fd, sizeof none);
    void *kept = (void *)syscall(SYS_mmap, 0, sizeof none, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (kept != MAP_FAILED) counters = kept;
}

static void tell(const char *about) {
    char thread[20] = "";
    prctl(PR_GET_NAME, thread);
    snprintf(point->told, sizeof point->told, "thread %s: %s", thread, about);
    point->fired_pid = of_pid;
    /* No kernel reports for a socket that it is full or has a bad block. */
    refused_with = strncmp(about, "socket:", 7) ? point->error : ECONNRESET;
    point->fired_error = refused_with;
    __atomic_store_n(&point->fired, 2, __ATOMIC_RELEASE);
}

static int is_reached(int function, uint32_t n) {
    int32_t nobody = 0;
    if (__atomic_load_n(&point->role, __ATOMIC_ACQUIRE) != role || point->function != function)
        return 0;
    if (point->pid && point->pid != of_pid) return 0;
    if (point->pid) n = __atomic_add_fetch(&point->calls, 1, __ATOMIC_RELAXED);
    return n == point->number && __atomic_compare_exchange_n(&point->fired, &nobody, 1, 0,
                                                             __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}

/* Whether this call must fail; sets errno if it must. */
static int fails(int function, const char *about, int starts) {
    if (!role) return 0;
    int pid = syscall(SYS_getpid);
    if (pid != of_pid) { /* forked */
        if (role != ZYGOTE || of_pid != first_pid) { role = NOBODY; return 0; }
        role = forks == 1 ? WRITER : WORKER; /* the zygote's first child writes the logs */
        of_pid = pid, begun = 0, starts = 1, counters = none;
    }
    int saved = errno;
    if (!begun) {
        if (!starts) return 0;
        begun = 1, keep_counters();
    }
    uint32_t n = __atomic_add_fetch(&counters[function], 1, __ATOMIC_RELAXED);
    errno = saved;
    if (!is_reached(function, n)) return 0;
    tell(about);
    errno = refused_with;
    return 1;
}

static int called_by(void *caller, const char *library, Dl_info *found) {
    return dladdr(caller, found) && found->dli_fname && strstr(found->dli_fname, library);
}
static int is_own(const char *path) {
    /* In /proc only what is about processes: libraries choose their arithmetic by /proc/cpuinfo. */
    if (path && !strcmp(path, "/dev/urandom")) return 0; /* without it cryptography aborts */
    return path && (!strncmp(path, under, strlen(under)) || !strncmp(path, "/dev/", 5) ||
                    !strncmp(path, "/proc/self", 10) || path[0] != '/' ||
                    (!strncmp(path, "/proc/", 6) && path[6] >= '0' && path[6] <= '9'));
}
static int starts_work(const char *path) {
    return (role == RUN || role == COORDINATOR || role == AGENT) &&
           !strncmp(path, under, strlen(under));
}
static int fails_path(int function, const char *path) {
    return is_own(path) && fails(function, path, starts_work(path));
}
static int fails_descriptor(int function, int fd) {
    struct stat found;
    if (!role || fstat(fd, &found) || !(S_ISREG(found.st_mode) || S_ISSOCK(found.st_mode))) return 0;
    char link[64], path[512] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (length < 0) length = 0;
    path[length] = 0;
    if (S_ISREG(found.st_mode) && !is_own(path)) return 0;
    return fails(function, path, 0);
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

/* Python tries fork after vfork has failed; what refuses one refuses the other. */
static __thread int vfork_failed;
pid_t fork(void) {
    REAL(fork);
    if (vfork_failed) { vfork_failed = 0, errno = refused_with; return -1; }
    if (fails(FORK, "", role == KEEPER)) return -1;
    forks++;
    return real();
}
/* A real vfork does not work in a wrapper: its child's return would destroy the caller's frame.
 * Like vfork, this clone calls none of the handlers that libraries have for fork. */
pid_t vfork(void) {
    if (fails(FORK, "vfork", 0)) { vfork_failed = 1; return -1; }
    return syscall(SYS_clone, SIGCHLD, 0, NULL, NULL, 0);
}
#define CALLER __builtin_return_address(0)
/* Whether gRPC calls, perhaps through Python: without the thread that it starts it crashes. */
static int is_below_grpc(void) {
    void *frames[64];
    Dl_info found;
    for (int n = backtrace(frames, 64); n > 0; n--)
        if (called_by(frames[n - 1], "grpc", &found)) return 1;
    return 0;
}
int pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*f)(void *), void *x) {
    Dl_info found = {0};
    REAL(pthread_create);
    if (role && is_below_grpc()) return real(t, a, f, x);
    called_by(CALLER, "", &found);
    return fails(THREAD, found.dli_fname ? found.dli_fname : "", 0) ? errno : real(t, a, f, x);
}

#define MODE va_list rest; va_start(rest, flags); \
    mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(rest, mode_t) : 0; va_end(rest)
int open(const char *p, int flags, ...) {
    REAL(open); MODE; return fails_path(OPEN, p) ? -1 : real(p, flags, mode);
}
int open64(const char *p, int flags, ...) {
    REAL(open64); MODE; return fails_path(OPEN, p) ? -1 : real(p, flags, mode);
}
int openat(int d, const char *p, int flags, ...) {
    REAL(openat); MODE; return fails_path(OPEN, p) ? -1 : real(d, p, flags, mode);
}
int openat64(int d, const char *p, int flags, ...) {
    REAL(openat64); MODE; return fails_path(OPEN, p) ? -1 : real(d, p, flags, mode);
}
DIR *opendir(const char *p) { REAL(opendir); return fails_path(OPEN, p) ? NULL : real(p); }
ssize_t read(int d, void *b, size_t n) {
    REAL(read); return fails_descriptor(READ, d) ? -1 : real(d, b, n);
}
ssize_t write(int d, const void *b, size_t n) {
    Dl_info found = {0};
    REAL(write);
    /* gRPC wakes itself through a socket whose two ends it holds, once for any number of events. */
    if (role && called_by(__builtin_return_address(0), "grpc", &found)) return real(d, b, n);
    return fails_descriptor(WRITE, d) ? -1 : real(d, b, n);
}
ssize_t writev(int d, const struct iovec *v, int n) {
    REAL(writev); return fails_descriptor(WRITE, d) ? -1 : real(d, v, n);
}
int fsync(int d) { REAL(fsync); return fails(FSYNC, "", 0) ? -1 : real(d); }
int fdatasync(int d) { REAL(fdatasync); return fails(FSYNC, "", 0) ? -1 : real(d); }
int rename(const char *a, const char *b) {
    REAL(rename); return fails_path(RENAME, b) ? -1 : real(a, b);
}
int mkdir(const char *p, mode_t m) { REAL(mkdir); return fails_path(MKDIR, p) ? -1 : real(p, m); }
int socket(int f, int t, int p) { REAL(socket); return fails(SOCKET, "", 0) ? -1 : real(f, t, p); }
int socketpair(int f, int t, int p, int v[2]) {
    REAL(socketpair); return fails(SOCKET, "pair", 0) ? -1 : real(f, t, p, v);
}
int connect(int d, const struct sockaddr *a, socklen_t n) {
    REAL(connect); return fails(CONNECT, "", 0) ? -1 : real(d, a, n);
}
int accept(int d, struct sockaddr *a, socklen_t *n) {
    REAL(accept); return fails(ACCEPT, "", 0) ? -1 : real(d, a, n);
}
int accept4(int d, struct sockaddr *a, socklen_t *n, int f) {
    REAL(accept4); return fails(ACCEPT, "", 0) ? -1 : real(d, a, n, f);
}
ssize_t send(int d, const void *b, size_t n, int f) {
    REAL(send); return fails(SEND, "", 0) ? -1 : real(d, b, n, f);
}
ssize_t sendmsg(int d, const struct msghdr *m, int f) {
    REAL(sendmsg); return fails(SEND, "", 0) ? -1 : real(d, m, f);
}
ssize_t recv(int d, void *b, size_t n, int f) {
    REAL(recv); return fails(RECV, "", 0) ? -1 : real(d, b, n, f);
}
ssize_t recvmsg(int d, struct msghdr *m, int f) {
    REAL(recvmsg); return fails(RECV, "", 0) ? -1 : real(d, m, f);
}
static int fails_pipe(void *caller, int starts) {
    Dl_info found = {0};
    called_by(caller, "", &found);
    return fails(PIPE, found.dli_fname ? found.dli_fname : "", starts);
}
int pipe(int v[2]) { REAL(pipe); return fails_pipe(CALLER, 0) ? -1 : real(v); }
int pipe2(int v[2], int flags) {
    REAL(pipe2);
    return fails_pipe(CALLER, role == ZYGOTE && (flags & O_NONBLOCK)) ? -1 : real(v, flags);
}
/* gRPC deliberately ends the process when it gets no memory or no way to be woken. Without one of
 * its threads, its C code waits for that thread for ever when a server stops. */
static int fails_called_by(int function, void *caller) {
    Dl_info found = {0};
    if (!role || called_by(caller, "grpc", &found)) return 0;
    return fails(function, found.dli_fname ? found.dli_fname : "", 0);
}
int epoll_create1(int f) { REAL(epoll_create1); return fails_called_by(EPOLL, CALLER) ? -1 : real(f); }
int eventfd(unsigned int n, int f) {
    REAL(eventfd); return fails_called_by(EPOLL, CALLER) ? -1 : real(n, f);
}
/* Python's Thread.start() waits for ever for a thread that gets no memory to begin
 * (python/cpython#140746), and no caller notices. So the first memory that a thread's Python asks
 * for is always given. */
static __thread int had_memory;
static int fails_memory(void *caller) {
    Dl_info found = {0};
    if (role && !had_memory && syscall(SYS_gettid) != syscall(SYS_getpid) &&
        called_by(caller, "python", &found)) {
        had_memory = 1;
        return 0;
    }
    return fails_called_by(MMAP, caller);
}
void *mmap(void *a, size_t n, int p, int f, int d, off_t o) {
    return fails_memory(CALLER) ? MAP_FAILED : (void *)syscall(SYS_mmap, a, n, p, f, d, o);
}
void *mmap64(void *a, size_t n, int p, int f, int d, off64_t o) {
    return fails_memory(CALLER) ? MAP_FAILED : (void *)syscall(SYS_mmap, a, n, p, f, d, o);
}
