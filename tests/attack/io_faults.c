/* Makes calls on files below a folder fail: LD_PRELOAD this, with
 *   FAULT_PATH   text that the file's path has
 *   FAULT_CALL   write, pwrite, fsync, ftruncate or rename (with the exchange of two names)
 *   FAULT_AT     which call of that kind fails, from 1
 *   FAULT_ERRNO  its errno; 0 writes half of the bytes, once
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static int calls;

static int named(const char *call, const char *path) {
    const char *wanted = getenv("FAULT_CALL"), *part = getenv("FAULT_PATH"), *at = getenv("FAULT_AT");
    if (!wanted || !part || !at || strcmp(wanted, call) || !strstr(path, part)) return 0;
    return __sync_add_and_fetch(&calls, 1) == atoi(at);
}

static int fails(const char *call, int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return named(call, path);
}

static int code(void) { return atoi(getenv("FAULT_ERRNO")); }

#define NEXT(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *data, size_t size) {
    if (fails("write", fd)) {
        if (code()) { errno = code(); return -1; }
        size = size / 2 + (size == 1);
    }
    return NEXT(write)(fd, data, size);
}

static ssize_t positioned(int fd, const void *data, size_t size, off64_t at) {
    if (fails("pwrite", fd)) {
        if (code()) { errno = code(); return -1; }
        size = size / 2 + (size == 1);
    }
    return NEXT(pwrite64)(fd, data, size, at);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return positioned(fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { return positioned(fd, data, size, at); }

int fsync(int fd) {
    if (fails("fsync", fd)) { errno = code(); return code() ? -1 : 0; }
    return NEXT(fsync)(fd);
}

int ftruncate64(int fd, off64_t size) {
    if (fails("ftruncate", fd) && code()) { errno = code(); return -1; }
    return NEXT(ftruncate64)(fd, size);
}

int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

int rename(const char *from, const char *to) {
    if (named("rename", to) && code()) { errno = code(); return -1; }
    return NEXT(rename)(from, to);
}

int renameat2(int old_dir, const char *from, int new_dir, const char *to, unsigned flags) {
    if (named("rename", to) && code()) { errno = code(); return -1; }
    return NEXT(renameat2)(old_dir, from, new_dir, to, flags);
}
