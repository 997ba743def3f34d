/* exec_watch_linux.c - exec_watch.h for Linux.
 *
 * Two things are known at the end of the program. The plug-in reports when it is loaded and when a
 * context is created on its device (kvp_report in integrations/llama.cpp/log.c). A look at the
 * processes now and then shows whether one of them opened a model, and whether it has ggml's
 * libraries. A program that opened no model is not blamed for having compressed none. */
#define _GNU_SOURCE
#include "exec_watch.h"

#include "command.h"
#include "exec_scan.h"
#include "plugin.h"
#include "progress.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434 /* Linux 5.3, on every architecture */
#endif

/* The next look at the processes comes after a tenth of the time that has passed. So a model is
 * seen if it stays open for a tenth of the program's time. */
enum { FIRST_LOOK_MS = 100, LAST_LOOK_MS = 30000 };
/* The plug-in is loaded before a model is opened. A script may read a model's metadata first and
 * start a program then, but it does not keep the file open for so long. */
enum { OPEN_MS = 10000 };
/* Processes that die together with the program need a moment for it. */
enum { DYING_MS = 100 };

/* Descriptors that a shell or a program gives to another one have low numbers. */
enum { MOST_FILES = 1024 };

/* The watched program, and the facts about it that are known so far. */
typedef struct watch {
    int program, reports; /* a descriptor of the process, a socket */
    char word[64];        /* KVANT_WATCH=... */
    const char *plugin;
    bool loaded, done; /* done: the plug-in has said, or will say, what becomes of the cache */
    scan seen;         /* at any time */
    int64_t opened;    /* when a model was seen that has been open since; 0: none is */
} watch;

static void read_reports(watch *w)
{
    char text[16];
    ssize_t n;
    while ((n = recv(w->reports, text, sizeof text - 1, MSG_DONTWAIT)) >= 0) {
        text[n] = 0;
        w->loaded = w->loaded || strcmp(text, "loaded") == 0;
        w->done = w->done || strcmp(text, "refused") == 0 || strcmp(text, "context") == 0;
    }
}

/* Whether a process of the program runs. */
static bool look(watch *w)
{
    scan now;
    scan_processes(w->word, w->plugin, &now);
    w->seen.ggml = w->seen.ggml || now.ggml;
    w->seen.plugin = w->seen.plugin || now.plugin;
    w->seen.mapped = w->seen.mapped || now.mapped;
    if (now.model[0] != 0)
        memcpy(w->seen.model, now.model, sizeof now.model);
    w->opened = now.model[0] == 0 ? 0 : w->opened != 0 ? w->opened : monotonic_milliseconds();
    return now.alive;
}

/* The plug-in was loaded where it is mapped, even if its report did not arrive. */
static bool is_missing(const watch *w)
{
    return !w->loaded && !w->seen.plugin && w->seen.model[0] != 0;
}

static void say_why(const watch *w)
{
    const char *model = w->seen.model;
    if (is_missing(w) && w->seen.ggml)
        complain("exec: warning: %s was opened, but kvant was not loaded, because ggml's back ends "
                 "are linked into the program's libraries: a llama.cpp program needs "
                 "--device " PLUGIN_DEVICE
                 ", a binding must call ggml_backend_load_all() before it loads a "
                 "model",
                 model);
    else if (is_missing(w))
        complain("exec: warning: %s was opened, but ggml was not loaded: this program has ggml "
                 "linked in (koboldcpp, LM Studio's engine) or never loaded it; kvant needs a "
                 "build whose ggml is a shared library",
                 model);
    else if (w->loaded && w->seen.mapped)
        complain("exec: warning: %s was loaded, but no context was made on kvant's device: let the "
                 "program take all devices or choose " PLUGIN_DEVICE ", with all layers",
                 model);
}

/* Called when the program has ended. While a process that it started goes on, the outcome is open,
 * and nothing is printed. */
static void finish(watch *w)
{
    for (int tries = 0; look(w); tries++) {
        if (tries > 0)
            return;
        usleep(DYING_MS * 1000);
    }
    read_reports(w);
    if (!w->done)
        say_why(w);
}

static int next_look(int64_t since)
{
    const int64_t wait = (monotonic_milliseconds() - since) / 10;
    return (int)(wait < FIRST_LOOK_MS ? FIRST_LOOK_MS : wait > LAST_LOOK_MS ? LAST_LOOK_MS : wait);
}

static void follow(watch *w)
{
    const int64_t since = monotonic_milliseconds();
    struct pollfd ready[] = { { .fd = w->program, .events = POLLIN },
                              { .fd = w->reports, .events = POLLIN } };
    for (;;) {
        const int n = poll(ready, 2, next_look(since));
        if (n < 0 && errno != EINTR)
            return;
        read_reports(w);
        if (w->done)
            return;
        if (n > 0 && ready[0].revents != 0) {
            finish(w);
            return;
        }
        if (n == 0)
            look(w);
        if (is_missing(w) && w->opened != 0 && monotonic_milliseconds() - w->opened >= OPEN_MS) {
            say_why(w);
            return;
        }
    }
}

/* Leaves the program's session, its folder and its files. stderr stays, for the line. */
static void detach(watch *w)
{
    const int nothing = open("/dev/null", O_RDWR);
    setsid();
    if (nothing < 0 || chdir("/") != 0 || dup2(nothing, 0) < 0 || dup2(nothing, 1) < 0)
        _exit(0);
    for (int fd = 3; fd < MOST_FILES; fd++)
        if (fd != w->program && fd != w->reports)
            close(fd);
}

/* A socket with a name of this process and this time; -1 without one. */
static int open_reports(char *word, size_t bytes)
{
    struct sockaddr_un at = { .sun_family = AF_UNIX };
    const int n = snprintf(word, bytes, PLUGIN_ENV_WATCH "=kvant-%ld-%llx", (long)getpid(),
                           (unsigned long long)monotonic_milliseconds());
    const char *name = word + strlen(PLUGIN_ENV_WATCH "=");
    const int in = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    memcpy(at.sun_path + 1, name, strlen(name)); /* the first byte, 0, keeps it out of folders */
    const socklen_t length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name));
    if (in >= 0 && n > 0 && bind(in, (struct sockaddr *)&at, length) == 0 &&
        setenv(PLUGIN_ENV_WATCH, name, 1) == 0)
        return in;
    if (in >= 0)
        close(in);
    return -1;
}

/* Forks twice: this process, as the program, must have no child that it does not know. */
static void start(watch *w)
{
    const pid_t child = fork();
    if (child == 0) {
        detach(w);
        if (fork() == 0)
            follow(w);
        _exit(0);
    }
    if (child > 0)
        waitpid(child, NULL, 0);
}

void watch_start(const char *plugin)
{
    watch w = { .plugin = plugin, .reports = -1 };
    unsetenv(PLUGIN_ENV_WATCH); /* of an exec around this one */
    if (getpid() == 1) /* of a container: it would inherit the watching process as its child */
        return;
    w.program = (int)syscall(SYS_pidfd_open, getpid(), 0);
    if (w.program >= 0)
        w.reports = open_reports(w.word, sizeof w.word);
    if (w.reports >= 0)
        start(&w);
    else
        unsetenv(PLUGIN_ENV_WATCH);
    if (w.reports >= 0)
        close(w.reports);
    if (w.program >= 0)
        close(w.program);
}
