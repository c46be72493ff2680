/* Stands between a program and its file system, by LD_PRELOAD; shim.py explains it and drives it.
 *
 * What happens to files beneath SHIM_ROOT is written to SHIM_TRACE in the order in which it was done, and rules from the
 * shared page SHIM_CONTROL make single calls fail, wait or kill the process. The wall clock is moved by that page too.
 * System calls are made directly, so but for closedir nothing here depends on the libc's functions of the same names.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define RULES_MAX 16
#define FDS_MAX 65536
#define TRACE_FD_MIN 500
#define CONTROL_BYTES 65536
#define PIECES_MAX 1024

enum kind { CREATE = 1, OPEN, WRITE, TRUNCATE, SYNC_BEGIN, SYNC, RENAME, UNLINK, MKDIR, RMDIR, LINK, ALLOCATE, READ, KINDS };

struct rule {
    int32_t kinds;        /* a bit for each kind */
    int32_t action;       /* an errno, or one of the actions below */
    int64_t after, times; /* lets `after` calls through, then acts on `times` of them; below 0: on all */
    int64_t from, to;     /* of reads and writes only those that touch these bytes */
    int64_t delay_us;
    int64_t matched, fired;
    char pattern[192];
};
enum action { DELAY = 1000, SHORT = 1001, KILL = 1002 };

struct control {
    int64_t clock_offset_ns, slept_ns;
    int64_t rule_count;
    struct rule rules[RULES_MAX];
};

struct record {
    uint8_t kind, flags;
    uint16_t path_bytes, other_bytes;
    uint16_t error;
    uint64_t inode;
    int64_t offset, size; /* of a sync: its number */
    int64_t time_ns;
    uint64_t data_bytes;
};

static struct control *control;
static int trace_fd = -1;
static char root[PATH_MAX];
static size_t root_bytes;
static unsigned char ours[FDS_MAX];
static int64_t sync_number;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("SHIM_ROOT"), *page = getenv("SHIM_CONTROL"), *trace = getenv("SHIM_TRACE");
    if (!path || !page) return;
    strncpy(root, path, sizeof root - 1);
    root_bytes = strlen(root);
    int fd = syscall(SYS_openat, AT_FDCWD, page, O_RDWR | O_CLOEXEC, 0);
    void *mapped = fd < 0 ? MAP_FAILED : mmap(NULL, CONTROL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED) {
        fprintf(stderr, "shim: no control page %s\n", page);
        _exit(97);
    }
    syscall(SYS_close, fd);
    control = mapped;
    if (trace && *trace) {
        fd = syscall(SYS_openat, AT_FDCWD, trace, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        trace_fd = syscall(SYS_fcntl, fd, F_DUPFD_CLOEXEC, TRACE_FD_MIN);
        if (trace_fd < 0) trace_fd = fd;
        else syscall(SYS_close, fd);
    }
}

static int64_t now_ns(void) {
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* The path relative to the root, or NULL if it is elsewhere; the root itself is ".". */
static const char *beneath(const char *absolute) {
    if (!root_bytes || strncmp(absolute, root, root_bytes)) return NULL;
    if (absolute[root_bytes] == '\0') return ".";
    return absolute[root_bytes] == '/' ? absolute + root_bytes + 1 : NULL;
}

static const char *path_at(int dirfd, const char *path, char *buffer) {
    if (path[0] == '/') {
        snprintf(buffer, PATH_MAX, "%s", path);
    } else {
        char link[64];
        if (dirfd == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
        else snprintf(link, sizeof link, "/proc/self/fd/%d", dirfd);
        ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, link, buffer, PATH_MAX - 1);
        if (size < 0) return NULL;
        snprintf(buffer + size, PATH_MAX - size, "/%s", path);
    }
    size_t size = strlen(buffer);
    while (size > 1 && buffer[size - 1] == '/') buffer[--size] = '\0';
    return beneath(buffer);
}

static const char *path_of(int fd, char *buffer) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, link, buffer, PATH_MAX - 1);
    if (size < 0) return NULL;
    buffer[size] = '\0';
    char *deleted = strstr(buffer, " (deleted)");
    if (deleted) *deleted = '\0';
    return beneath(buffer);
}

static int is_ours(int fd) { return control && fd >= 0 && fd < FDS_MAX && ours[fd]; }
static void set_ours(int fd, int value) { if (fd >= 0 && fd < FDS_MAX) ours[fd] = value; }

static uint64_t inode_of(int fd) {
    struct stat now;
    return fstat(fd, &now) ? 0 : now.st_ino;
}

static uint64_t inode_at(int dirfd, const char *path) {
    struct stat now;
    return fstatat(dirfd, path, &now, AT_SYMLINK_NOFOLLOW) ? 0 : now.st_ino;
}

/* What the rules say of a call: 0, an errno that it is to fail with, or SHORT. Delays and kills happen here. */
static int judge(enum kind kind, const char *path, const char *other, int64_t from, int64_t to) {
    int verdict = 0;
    int64_t delay_us = 0;
    if (!control->rule_count || !path) return 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < control->rule_count && i < RULES_MAX; i++) {
        struct rule *rule = &control->rules[i];
        if (!(rule->kinds & (1 << kind)) || from >= rule->to || to <= rule->from) continue;
        if (fnmatch(rule->pattern, path, 0) && (!other || fnmatch(rule->pattern, other, 0))) continue;
        int64_t number = rule->matched++;
        if (number < rule->after || (rule->times >= 0 && number >= rule->after + rule->times)) continue;
        rule->fired++;
        if (rule->action == KILL) syscall(SYS_kill, getpid(), SIGKILL);
        if (rule->action == DELAY) delay_us += rule->delay_us;
        else if (!verdict) verdict = rule->action;
    }
    pthread_mutex_unlock(&lock);
    if (delay_us) {
        struct timespec wait = {delay_us / 1000000, delay_us % 1000000 * 1000};
        syscall(SYS_nanosleep, &wait, NULL);
    }
    return verdict;
}

static int judge_fd(enum kind kind, int fd, int64_t from, int64_t to) {
    char buffer[PATH_MAX];
    return control->rule_count ? judge(kind, path_of(fd, buffer), NULL, from, to) : 0;
}

static int fails(int verdict) {
    if (verdict <= 0 || verdict >= DELAY) return 0;
    errno = verdict;
    return 1;
}

static void note(struct record record, const char *path, const char *other, const struct iovec *data, int pieces) {
    if (trace_fd < 0) return;
    int before = errno;
    struct iovec all[PIECES_MAX + 3];
    record.path_bytes = path ? strlen(path) : 0;
    record.other_bytes = other ? strlen(other) : 0;
    record.time_ns = now_ns();
    int count = 0;
    all[count++] = (struct iovec){&record, sizeof record};
    all[count++] = (struct iovec){(void *)path, record.path_bytes};
    all[count++] = (struct iovec){(void *)other, record.other_bytes};
    uint64_t left = record.data_bytes;
    for (int i = 0; i < pieces && left; i++) {
        size_t size = data[i].iov_len < left ? data[i].iov_len : left;
        all[count++] = (struct iovec){data[i].iov_base, size};
        left -= size;
    }
    pthread_mutex_lock(&lock);
    if (syscall(SYS_writev, trace_fd, all, count) < 0) _exit(98);
    pthread_mutex_unlock(&lock);
    errno = before;
}

/* Opening and closing */

static int do_open(int dirfd, const char *path, int flags, mode_t mode) {
    char buffer[PATH_MAX];
    const char *name = control ? path_at(dirfd, path, buffer) : NULL;
    if (!name) {
        int fd = syscall(SYS_openat, dirfd, path, flags, mode);
        set_ours(fd, 0);
        return fd;
    }
    int existed = inode_at(dirfd, path) != 0;
    int creates = (flags & O_CREAT) && !existed, cuts = (flags & O_TRUNC) && existed;
    if (fails(judge(OPEN, name, NULL, 0, INT64_MAX))) return -1;
    if (creates && fails(judge(CREATE, name, NULL, 0, INT64_MAX))) return -1;
    int fd = syscall(SYS_openat, dirfd, path, flags, mode);
    set_ours(fd, fd >= 0);
    if (fd >= 0 && creates) note((struct record){.kind = CREATE, .inode = inode_of(fd)}, name, NULL, NULL, 0);
    if (fd >= 0 && cuts) note((struct record){.kind = TRUNCATE, .inode = inode_of(fd)}, NULL, NULL, NULL, 0);
    return fd;
}

#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | __O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }

int open(const char *path, int flags, ...) { MODE(flags) return do_open(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) return do_open(AT_FDCWD, path, flags, mode); }
int openat(int dirfd, const char *path, int flags, ...) { MODE(flags) return do_open(dirfd, path, flags, mode); }
int openat64(int dirfd, const char *path, int flags, ...) { MODE(flags) return do_open(dirfd, path, flags, mode); }

int close(int fd) {
    set_ours(fd, 0);
    return syscall(SYS_close, fd);
}

/* It closes its descriptor behind the back of close(). */
int closedir(DIR *directory) {
    static int (*real)(DIR *);
    if (!real) real = (int (*)(DIR *))dlsym(RTLD_NEXT, "closedir");
    int fd = dirfd(directory);
    set_ours(fd, 0);
    return real(directory);
}

static int do_fcntl(int fd, int command, long argument) {
    int result = syscall(SYS_fcntl, fd, command, argument);
    if ((command == F_DUPFD || command == F_DUPFD_CLOEXEC) && result >= 0) set_ours(result, is_ours(fd));
    return result;
}

#define ARGUMENT(command) va_list rest; va_start(rest, command); long argument = va_arg(rest, long); va_end(rest);
int fcntl(int fd, int command, ...) { ARGUMENT(command) return do_fcntl(fd, command, argument); }
int fcntl64(int fd, int command, ...) { ARGUMENT(command) return do_fcntl(fd, command, argument); }

/* Writing */

static ssize_t do_write(int fd, const struct iovec *data, int pieces, int64_t offset, int flags) {
    /* offset -1: at the file's position */
    int64_t size = 0;
    for (int i = 0; i < pieces; i++) size += data[i].iov_len;
    struct iovec half;
    if (is_ours(fd)) {
        int64_t from = offset < 0 ? 0 : offset;
        int verdict = judge_fd(WRITE, fd, from, offset < 0 ? INT64_MAX : from + size + !size);
        if (fails(verdict)) return -1;
        if (verdict == SHORT && size > 1) {
            half = (struct iovec){data[0].iov_base, data[0].iov_len > 1 ? data[0].iov_len / 2 : 1};
            data = &half, pieces = 1;
        }
    }
    ssize_t written = offset < 0 ? syscall(SYS_writev, fd, data, pieces)
                                 : syscall(SYS_pwritev2, fd, data, pieces, offset, offset >> 32 >> 32, flags);
    if (is_ours(fd) && written > 0 && trace_fd >= 0) {
        int before = errno;
        if (offset < 0) offset = syscall(SYS_lseek, fd, 0, SEEK_CUR) - written;
        errno = before;
        note((struct record){.kind = WRITE, .inode = inode_of(fd), .offset = offset, .size = written, .data_bytes = written,
                             .flags = (flags & (RWF_SYNC | RWF_DSYNC)) != 0}, NULL, NULL, data, pieces);
    }
    return written;
}

ssize_t write(int fd, const void *data, size_t size) {
    if (!is_ours(fd)) return syscall(SYS_write, fd, data, size);
    return do_write(fd, &(struct iovec){(void *)data, size}, 1, -1, 0);
}
ssize_t writev(int fd, const struct iovec *data, int pieces) {
    return is_ours(fd) ? do_write(fd, data, pieces, -1, 0) : syscall(SYS_writev, fd, data, pieces);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return do_write(fd, &(struct iovec){(void *)data, size}, 1, offset, 0); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) { return do_write(fd, &(struct iovec){(void *)data, size}, 1, offset, 0); }
ssize_t pwritev(int fd, const struct iovec *data, int pieces, off_t offset) { return do_write(fd, data, pieces, offset, 0); }
ssize_t pwritev64(int fd, const struct iovec *data, int pieces, off64_t offset) { return do_write(fd, data, pieces, offset, 0); }
ssize_t pwritev2(int fd, const struct iovec *data, int pieces, off_t offset, int flags) { return do_write(fd, data, pieces, offset, flags); }
ssize_t pwritev64v2(int fd, const struct iovec *data, int pieces, off64_t offset, int flags) { return do_write(fd, data, pieces, offset, flags); }

static int do_truncate(int fd, off64_t size) {
    if (is_ours(fd) && fails(judge_fd(TRUNCATE, fd, 0, INT64_MAX))) return -1;
    int result = syscall(SYS_ftruncate, fd, size);
    if (!result && is_ours(fd)) note((struct record){.kind = TRUNCATE, .inode = inode_of(fd), .size = size}, NULL, NULL, NULL, 0);
    return result;
}
int ftruncate(int fd, off_t size) { return do_truncate(fd, size); }
int ftruncate64(int fd, off64_t size) { return do_truncate(fd, size); }

static int do_truncate_path(const char *path, off64_t size) {
    char buffer[PATH_MAX];
    const char *name = control ? path_at(AT_FDCWD, path, buffer) : NULL;
    if (name && fails(judge(TRUNCATE, name, NULL, 0, INT64_MAX))) return -1;
    int result = syscall(SYS_truncate, path, size);
    if (!result && name) note((struct record){.kind = TRUNCATE, .inode = inode_at(AT_FDCWD, path), .size = size}, NULL, NULL, NULL, 0);
    return result;
}
int truncate(const char *path, off_t size) { return do_truncate_path(path, size); }
int truncate64(const char *path, off64_t size) { return do_truncate_path(path, size); }

static int do_allocate(int fd, int mode, off64_t offset, off64_t size) {
    if (is_ours(fd) && fails(judge_fd(ALLOCATE, fd, 0, INT64_MAX))) return -1;
    int result = syscall(SYS_fallocate, fd, mode, offset, size);
    if (!result && is_ours(fd))
        note((struct record){.kind = ALLOCATE, .inode = inode_of(fd), .flags = mode, .offset = offset, .size = size}, NULL, NULL, NULL, 0);
    return result;
}
int fallocate(int fd, int mode, off_t offset, off_t size) { return do_allocate(fd, mode, offset, size); }
int fallocate64(int fd, int mode, off64_t offset, off64_t size) { return do_allocate(fd, mode, offset, size); }
int posix_fallocate(int fd, off_t offset, off_t size) { return do_allocate(fd, 0, offset, size) ? errno : 0; }
int posix_fallocate64(int fd, off64_t offset, off64_t size) { return do_allocate(fd, 0, offset, size) ? errno : 0; }

/* Syncing. A sync covers what was written before it began, so its begin is noted too. */

static int do_sync(int fd, long number_of_call) {
    if (!is_ours(fd)) return syscall(number_of_call, fd);
    int64_t number = __atomic_add_fetch(&sync_number, 1, __ATOMIC_RELAXED);
    uint64_t inode = number_of_call == SYS_syncfs ? 0 : inode_of(fd);
    note((struct record){.kind = SYNC_BEGIN, .inode = inode, .size = number}, NULL, NULL, NULL, 0);
    int result = fails(judge_fd(SYNC, fd, 0, INT64_MAX)) ? -1 : syscall(number_of_call, fd);
    note((struct record){.kind = SYNC, .inode = inode, .size = number, .error = result ? errno : 0}, NULL, NULL, NULL, 0);
    return result;
}
int fsync(int fd) { return do_sync(fd, SYS_fsync); }
int fdatasync(int fd) { return do_sync(fd, SYS_fdatasync); }
int syncfs(int fd) { return do_sync(fd, SYS_syncfs); }

/* Names */

static int do_rename(int from_fd, const char *from, int to_fd, const char *to, unsigned flags) {
    char buffer[PATH_MAX], other_buffer[PATH_MAX];
    const char *name = control ? path_at(from_fd, from, buffer) : NULL, *other = control ? path_at(to_fd, to, other_buffer) : NULL;
    if (name && fails(judge(RENAME, name, other, 0, INT64_MAX))) return -1;
    int result = syscall(SYS_renameat2, from_fd, from, to_fd, to, flags);
    if (!result && name && other)
        note((struct record){.kind = RENAME, .inode = inode_at(to_fd, to)}, name, other, NULL, 0);
    return result;
}
int rename(const char *from, const char *to) { return do_rename(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int from_fd, const char *from, int to_fd, const char *to) { return do_rename(from_fd, from, to_fd, to, 0); }
int renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned flags) { return do_rename(from_fd, from, to_fd, to, flags); }

static int do_unlink(int dirfd, const char *path, int flags) {
    char buffer[PATH_MAX];
    enum kind kind = flags & AT_REMOVEDIR ? RMDIR : UNLINK;
    const char *name = control ? path_at(dirfd, path, buffer) : NULL;
    if (name && fails(judge(kind, name, NULL, 0, INT64_MAX))) return -1;
    int result = syscall(SYS_unlinkat, dirfd, path, flags);
    if (!result && name) note((struct record){.kind = kind}, name, NULL, NULL, 0);
    return result;
}
int unlink(const char *path) { return do_unlink(AT_FDCWD, path, 0); }
int remove(const char *path) { int result = do_unlink(AT_FDCWD, path, 0); return result && errno == EISDIR ? do_unlink(AT_FDCWD, path, AT_REMOVEDIR) : result; }
int unlinkat(int dirfd, const char *path, int flags) { return do_unlink(dirfd, path, flags); }
int rmdir(const char *path) { return do_unlink(AT_FDCWD, path, AT_REMOVEDIR); }

static int do_mkdir(int dirfd, const char *path, mode_t mode) {
    char buffer[PATH_MAX];
    const char *name = control ? path_at(dirfd, path, buffer) : NULL;
    if (name && fails(judge(MKDIR, name, NULL, 0, INT64_MAX))) return -1;
    int result = syscall(SYS_mkdirat, dirfd, path, mode);
    if (!result && name) note((struct record){.kind = MKDIR, .inode = inode_at(dirfd, path)}, name, NULL, NULL, 0);
    return result;
}
int mkdir(const char *path, mode_t mode) { return do_mkdir(AT_FDCWD, path, mode); }
int mkdirat(int dirfd, const char *path, mode_t mode) { return do_mkdir(dirfd, path, mode); }

static int do_link(int from_fd, const char *from, int to_fd, const char *to, int flags) {
    char buffer[PATH_MAX], other_buffer[PATH_MAX];
    const char *name = control ? path_at(from_fd, from, buffer) : NULL, *other = control ? path_at(to_fd, to, other_buffer) : NULL;
    if (name && fails(judge(LINK, name, other, 0, INT64_MAX))) return -1;
    int result = syscall(SYS_linkat, from_fd, from, to_fd, to, flags);
    if (!result && name && other) note((struct record){.kind = LINK, .inode = inode_at(to_fd, to)}, name, other, NULL, 0);
    return result;
}
int link(const char *from, const char *to) { return do_link(AT_FDCWD, from, AT_FDCWD, to, 0); }
int linkat(int from_fd, const char *from, int to_fd, const char *to, int flags) { return do_link(from_fd, from, to_fd, to, flags); }

/* Reading */

static int read_fails(int fd, int64_t offset, int64_t size) {
    if (!is_ours(fd) || !control->rule_count) return 0;
    if (offset < 0) offset = syscall(SYS_lseek, fd, 0, SEEK_CUR);
    return fails(judge_fd(READ, fd, offset, offset + size + !size));
}
static int64_t bytes_of(const struct iovec *data, int pieces) {
    int64_t size = 0;
    for (int i = 0; i < pieces; i++) size += data[i].iov_len;
    return size;
}
ssize_t read(int fd, void *data, size_t size) { return read_fails(fd, -1, size) ? -1 : syscall(SYS_read, fd, data, size); }
ssize_t readv(int fd, const struct iovec *data, int pieces) {
    return read_fails(fd, -1, bytes_of(data, pieces)) ? -1 : syscall(SYS_readv, fd, data, pieces);
}
ssize_t pread(int fd, void *data, size_t size, off_t offset) { return read_fails(fd, offset, size) ? -1 : syscall(SYS_pread64, fd, data, size, offset); }
ssize_t pread64(int fd, void *data, size_t size, off64_t offset) { return read_fails(fd, offset, size) ? -1 : syscall(SYS_pread64, fd, data, size, offset); }

static ssize_t do_preadv(int fd, const struct iovec *data, int pieces, int64_t offset, int flags) {
    if (read_fails(fd, offset, bytes_of(data, pieces))) return -1;
    return syscall(SYS_preadv2, fd, data, pieces, offset, offset >> 32 >> 32, flags);
}
ssize_t preadv(int fd, const struct iovec *data, int pieces, off_t offset) { return do_preadv(fd, data, pieces, offset, 0); }
ssize_t preadv64(int fd, const struct iovec *data, int pieces, off64_t offset) { return do_preadv(fd, data, pieces, offset, 0); }
ssize_t preadv2(int fd, const struct iovec *data, int pieces, off_t offset, int flags) { return do_preadv(fd, data, pieces, offset, flags); }
ssize_t preadv64v2(int fd, const struct iovec *data, int pieces, off64_t offset, int flags) { return do_preadv(fd, data, pieces, offset, flags); }

/* The wall clock */

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, clock, now);
    if (result || !control) return result;
    int64_t added_ns = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE ? control->clock_offset_ns
                       : clock == CLOCK_BOOTTIME                                 ? control->slept_ns
                                                                                 : 0;
    int64_t shown_ns = (int64_t)now->tv_sec * 1000000000 + now->tv_nsec + added_ns;
    now->tv_sec = shown_ns / 1000000000;
    now->tv_nsec = shown_ns % 1000000000;
    return result;
}
time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *restrict result, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    *result = (struct timeval){now.tv_sec, now.tv_nsec / 1000};
    return 0;
}
