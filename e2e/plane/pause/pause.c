// SPDX-License-Identifier: Apache-2.0

// pause holds a pod's namespaces open: it sleeps until it is told to end, and reaps what it inherits as the first
// process of a shared process namespace. In C, because a pod should not cost a language's runtime.
#include <signal.h>
#include <sys/wait.h>

int main(void) {
    sigset_t awaited;
    sigemptyset(&awaited);
    sigaddset(&awaited, SIGCHLD);
    sigaddset(&awaited, SIGINT);
    sigaddset(&awaited, SIGTERM);
    // Blocked before the first wait, so that none is lost between two of them.
    if (sigprocmask(SIG_BLOCK, &awaited, 0) != 0) {
        return 1;
    }
    for (;;) {
        int received = 0;
        if (sigwait(&awaited, &received) != 0) {
            return 1;
        }
        if (received != SIGCHLD) {
            return 0;
        }
        while (waitpid(-1, 0, WNOHANG) > 0) {
        }
    }
}
