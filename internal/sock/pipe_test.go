package sock

import (
	"bytes"
	"errors"
	"io"
	"math/rand"
	"os"
	"syscall"
	"testing"
	"time"
)

// through moves n bytes by one pipe, as they come.
func through(from, to *Conn, n int) (moved int, err error) {
	p, err := GetPipe()
	if err != nil {
		return 0, err
	}
	defer p.Release()
	for moved < n {
		if _, err := p.Fill(from, n-moved); err != nil {
			return moved, err
		}
		m, err := p.Drain(to)
		if moved += m; err != nil {
			return moved, err
		}
	}
	return moved, nil
}

func TestAPipeMovesAsMuchAsAsked(t *testing.T) {
	sender, from := connected(t)
	to, receiver := connected(t)
	sent := make([]byte, 8<<20)
	rand.New(rand.NewSource(1)).Read(sent)
	go func() {
		sender.Write(sent)
		sender.CloseWrite()
	}()
	type result struct {
		b   []byte
		err error
	}
	done := make(chan result)
	go func() {
		b, err := io.ReadAll(receiver)
		done <- result{b, err}
	}()
	spliced := len(sent) - 5
	if n, err := through(from, to, spliced); n != spliced || err != nil {
		t.Fatalf("moved %d, %v, want %d", n, err, spliced)
	}
	if rest, err := io.ReadAll(from); err != nil || !bytes.Equal(rest, sent[spliced:]) {
		t.Errorf("%d bytes were left, %v, want 5", len(rest), err)
	}
	if n, err := through(from, to, 1); n != 0 || err != io.EOF {
		t.Errorf("at the end %d, %v, want io.EOF", n, err)
	}
	to.CloseWrite()
	if got := <-done; got.err != nil || !bytes.Equal(got.b, sent[:spliced]) {
		t.Errorf("%d bytes came, %v, which aren't the %d moved", len(got.b), got.err, spliced)
	}
}

func TestAPipeHeedsDeadlines(t *testing.T) {
	sender, from := connected(t)
	to, _ := connected(t)
	p, err := GetPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer p.Release()
	from.SetReadDeadline(time.Unix(1, 0))
	if n, err := p.Fill(from, 1); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Fill after a deadline = %d, %v", n, err)
	}
	from.SetReadDeadline(time.Time{})
	sender.Write([]byte("frame"))
	if n, err := p.Fill(from, 100); n != 5 || err != nil {
		t.Fatalf("Fill = %d, %v, want 5", n, err)
	}
	to.SetWriteDeadline(time.Unix(1, 0))
	if n, err := p.Drain(to); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Drain after a deadline = %d, %v", n, err)
	}
	to.SetWriteDeadline(time.Time{})
	if n, err := p.Drain(to); n != 5 || err != nil {
		t.Errorf("Drain = %d, %v, want 5", n, err)
	}
}

// TestAPipeWithBytesInItIsClosed: nobody else may get them, and no descriptor may stay.
func TestAPipeWithBytesInItIsClosed(t *testing.T) {
	sender, from := connected(t)
	to, _ := connected(t)
	p, err := GetPipe()
	if err != nil {
		t.Fatal(err)
	}
	sender.Write([]byte("frame"))
	if _, err := p.Fill(from, 5); err != nil {
		t.Fatal(err)
	}
	to.CloseWrite()
	if n, err := p.Drain(to); n != 0 || !errors.Is(err, syscall.EPIPE) {
		t.Errorf("Drain after the stream's end = %d, %v, want EPIPE", n, err)
	}
	inode := func() uint64 {
		var stat syscall.Stat_t
		if syscall.Fstat(p.r, &stat) != nil {
			return 0
		}
		return stat.Ino
	}
	before := inode()
	p.Release()
	if before == 0 || inode() == before {
		t.Errorf("the pipe %d is still open", before)
	}
	if q, err := GetPipe(); err != nil || q == p || q.held != 0 {
		t.Errorf("the next pipe: %v, the same %v, holds %d bytes", err, q == p, q.held)
	}
}
