/*
 * The first process of a pod: it holds the pod's namespaces, and reaps orphans when the pod shares
 * its PID namespace.
 */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void end(int signal)
{
	(void)signal;
	_exit(0);
}

static void reap(int signal)
{
	(void)signal;
	while (waitpid(-1, 0, WNOHANG) > 0)
		;
}

int main(void)
{
	/* PID 1 gets no signal that it has no handler for. */
	struct sigaction on_end = {.sa_handler = end};
	struct sigaction on_child = {.sa_handler = reap, .sa_flags = SA_NOCLDSTOP};

	if (sigaction(SIGINT, &on_end, 0) || sigaction(SIGTERM, &on_end, 0) ||
	    sigaction(SIGCHLD, &on_child, 0))
		return 1;
	for (;;)
		pause();
}
