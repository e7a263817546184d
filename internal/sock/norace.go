//go:build !race

package sock

func raceBefore() {}

func raceAfter(uintptr) {}
