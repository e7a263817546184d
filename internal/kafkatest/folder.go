package kafkatest

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

const (
	folderPattern = "kmirror-kafka-*"
	inUse         = "in-use" // file in a cluster's folder that its test process holds locked
)

// newFolder makes the folder of a real cluster, and removes those of test processes that died without removing theirs.
func newFolder() (string, error) {
	left, _ := filepath.Glob(filepath.Join(os.TempDir(), folderPattern))
	for _, dir := range left {
		if lock, err := os.Open(filepath.Join(dir, inUse)); err == nil {
			if syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
				os.RemoveAll(dir)
			}
			lock.Close()
		}
	}
	// Made under a name that is no cluster's yet, so that nobody finds it before it is locked.
	unnamed, err := os.MkdirTemp("", "new-kmirror-kafka-")
	if err != nil {
		return "", err
	}
	lock, err := os.Create(filepath.Join(unnamed, inUse))
	if err != nil {
		return "", err
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", err
	}
	keepOpen([]*os.File{lock})
	dir := filepath.Join(filepath.Dir(unnamed), filepath.Base(unnamed)[len("new-"):])
	return dir, os.Rename(unnamed, dir)
}

// removeFolder removes a cluster's folder. With KMIRROR_KEEP it stays, also for test processes to come.
func removeFolder(dir string) {
	if os.Getenv("KMIRROR_KEEP") == "" {
		os.RemoveAll(dir)
		return
	}
	os.Remove(filepath.Join(dir, inUse))
}

// scratch makes a folder for the length of the test. Unlike t.TempDir it may be written to until then: a process that dies with the test's context
// may die after it.
func scratch(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "kmirror-scratch-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}
