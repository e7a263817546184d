package kafkatest

import (
	"os"
	"os/exec"
	"runtime"
	"sync"
)

// spawner starts processes on one thread that never ends: the kernel's "signal when the parent dies" watches the thread
// that started the process, and Go may end others.
var spawner = sync.OnceValue(func() chan<- spawnRequest {
	requests := make(chan spawnRequest)
	go func() {
		runtime.LockOSThread()
		for r := range requests {
			r.result <- r.cmd.Start()
		}
	}()
	return requests
})

type spawnRequest struct {
	cmd    *exec.Cmd
	result chan error
}

// Spawn starts cmd as cmd.Start does, but so that it gets SIGKILL when this test process ends, however that ends.
// On systems other than Linux it is only started.
func Spawn(cmd *exec.Cmd) error {
	dieWithParent(cmd)
	r := spawnRequest{cmd: cmd, result: make(chan error)}
	spawner() <- r
	return <-r.result
}

var kept struct {
	mu    sync.Mutex
	files []*os.File
}

// keepOpen holds files, and so their locks, until the process ends.
func keepOpen(files []*os.File) {
	kept.mu.Lock()
	kept.files = append(kept.files, files...)
	kept.mu.Unlock()
}
